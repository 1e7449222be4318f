"""What each `npu::` operator that msllm calls computes, in plain torch on the host.

One function an operator, by its name and with its schema's signature; `test_references` holds the
signatures to torch_npu's and the values to torch's. What the documentation forbids and torch_npu
itself would let through is refused here. Attention has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

REFERENCES: dict[str, Callable[..., Any]] = {}
"""Operator (`name`, or `name.overload`) -> its reference."""


def reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a reference under its function's name; `_out` at its end is an overload."""
    name = function.__name__
    REFERENCES[f"{name[:-4]}.out" if name.endswith("_out") else name] = function
    return function


def need(condition: bool, text: str) -> None:
    """Refuse what the operator's documentation does."""
    if not condition:
        raise ValueError(text)


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Any:
    """Differentiate a reference, where a formula would only be autograd's again."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), leaves, grad)


@reference
def npu_rms_norm(input, gamma, epsilon=1e-6):
    need(input.shape[-1:] == gamma.shape, f"gamma {gamma.shape} does not fit {input.shape}")
    rstd = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
    return (input.float() * rstd * gamma.float()).to(input.dtype), rstd


@reference
def npu_rms_norm_backward(dy, input, gamma, rstd):
    normed, slope = input.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (slope - normed * (slope * normed).mean(-1, keepdim=True))
    dgamma = (dy.float() * normed).flatten(0, -2).sum(0)
    return dx.to(input.dtype), dgamma  # in float32 whatever gamma's type


@reference
def npu_swiglu(input, dim=-1):
    need(input.shape[dim] % 2 == 0, f"SwiGLU of an odd width: {input.shape}")
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


@reference
def npu_swiglu_backward(grad_output, input, dim=-1):
    gate, up = input.float().chunk(2, dim)
    grad, sigmoid = grad_output.float(), torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad * up * slope, grad * gate * sigmoid), dim).to(input.dtype)


@reference
def npu_clipped_swiglu(x, *, group_index=None, dim=-1, alpha=1.702, limit=7.0, bias=1.0,
                       interleaved=True):  # fmt: skip
    need(group_index is None, "groups are not simulated")
    even, odd = (
        x.float().unflatten(dim, (-1, 2)).unbind(-1) if interleaved else x.float().chunk(2, dim)
    )
    gate, up = even.clamp(max=limit), odd.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + bias)).to(x.dtype)


_GELU = {0: "none", 1: "tanh"}


def _geglu(input: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    need(input.shape[dim] % 2 == 0, f"GeGLU of an odd width: {input.shape}")
    left, right = input.float().chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    gelu = F.gelu(gate, approximate=_GELU[approximate])
    return gelu * up, gelu


@reference
def npu_geglu(input, dim=-1, approximate=1, activate_left=False):
    return tuple(x.to(input.dtype) for x in _geglu(input, dim, approximate, activate_left))


@reference
def npu_geglu_grad(grad_output, input, gelu, dim=-1, approximate=1, activate_left=False):
    def forward(x: Tensor) -> Tensor:
        return _geglu(x, dim, approximate, activate_left)[0]

    return gradients(forward, [input.float()], grad_output.float())[0].to(input.dtype)


def _rotated(x: Tensor, rotary_mode: str) -> Tensor:
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@reference
def npu_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    need(rotate is None and rotary_mode in ("half", "interleave"), f"mode {rotary_mode}")
    need(input.dim() == r1.dim() == r2.dim() == 4, "rotary takes four dimensions")
    need(input.shape[-1] == r1.shape[-1] == r2.shape[-1], "tables as wide as the heads")
    rotated = _rotated(input.float(), rotary_mode)
    return (input.float() * r1.float() + rotated * r2.float()).to(input.dtype)


@reference
def npu_rotary_mul_backward(grad, input, r1, r2, rotary_mode="half"):
    back = -_rotated(grad.float() * r2.float(), rotary_mode)  # the rotation's transpose
    dx = (grad.float() * r1.float() + back).to(input.dtype)
    rotated = _rotated(input.float(), rotary_mode)
    dcos, dsin = (grad.float() * x for x in (input.float(), rotated))
    return dx, dcos.sum_to_size(r1.shape).to(r1.dtype), dsin.sum_to_size(r2.shape).to(r2.dtype)


@reference
def npu_apply_adam_w_out(beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad,
                         max_grad_norm, amsgrad, maximize, *, out):  # fmt: skip
    need(not amsgrad and max_grad_norm is None, "AMSGrad is not simulated")
    var, mean, square = out
    step = -grad if maximize else grad
    mean.lerp_(step, 1 - beta1)
    square.mul_(beta2).addcmul_(step, step, value=1 - beta2)
    unbiased = square / (1 - beta2_power * beta2)  # powers come as beta ** (step - 1)
    var.mul_(1 - lr * weight_decay)
    var.addcdiv_(mean / (1 - beta1_power * beta1), unbiased.sqrt() + epsilon, value=-lr)
    return var, mean, square


@reference
def repeat_interleave_backward_int(grad, input, repeats, dim=None):
    if dim is None:
        return grad.view(-1, repeats).sum(-1).view_as(input)
    return grad.unflatten(dim, (-1, repeats)).sum(dim % grad.dim() + 1)


@reference
def npu_format_cast(input, acl_format, *, customize_dtype=None, input_dtype=None):
    return input.clone()  # how a tensor lies in memory is nothing that values tell


def aten_matmul_backward(grad, self, other, mask):
    """torch has this gradient as a kernel of its own on accelerators, and not on the CPU."""
    grads = gradients(torch.matmul, [self, other], grad)
    return tuple(g if wanted else None for g, wanted in zip(grads, mask, strict=True))


ATEN: dict[str, Callable[..., Any]] = {"matmul_backward": aten_matmul_backward}
"""aten operators without a kernel on the host."""
