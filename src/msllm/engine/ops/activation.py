"""Gated activations of MLPs: one projection [..., 2f] holds gate and up, side by side.

The projections around them belong to the layer.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from msllm.engine.ops import ascend


def swiglu(x: Tensor, limit: float | None = None, alpha: float | None = None) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202): x [..., 2f] as gate | up -> [..., f].

    `limit` clamps the gate from above and up on both sides first. With `alpha` it is gpt-oss's
    gate * sigmoid(alpha * gate) * (up + 1).

    Left to autograd, which keeps `x` and silu(gate): an own backward pass that keeps `x` alone took
    as long to 1.35 times as long on a CPU.
    """
    gate, up = _halves(x, limit)
    if alpha is not None:
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return F.silu(gate) * up


def geglu(
    x: Tensor, approximate: Literal["tanh", "none"] = "tanh", limit: float | None = None
) -> Tensor:
    """gelu(gate) * up (arXiv:2002.05202): x [..., 2f] as gate | up -> [..., f]."""
    gate, up = _halves(x, limit)
    return F.gelu(gate, approximate=approximate) * up


def swiglu_npu(x: Tensor, limit: float | None = None, alpha: float | None = None) -> Tensor:
    """As `swiglu`, by `npu_swiglu`: gate first, as here; fp32, bf16 or fp16 [..., 2f] -> [..., f].

    `limit` and `alpha` are computed by the reference: `npu_clipped_swiglu` has no backward pass.

    Raises:
        ValueError: An odd width, of which the operator drops the last.
    """
    if limit is not None or alpha is not None:
        ascend.left_to_reference("swiglu", "a limit or alpha")
        return swiglu(x, limit, alpha)
    _check_halves(x)
    out: Tensor = ascend.torch_npu().npu_swiglu(x, dim=-1)
    return out


def geglu_npu(
    x: Tensor, approximate: Literal["tanh", "none"] = "tanh", limit: float | None = None
) -> Tensor:
    """As `geglu`, forward by `npu_geglu`; fp32, bf16 or fp16 [..., 2f] -> [..., f].

    By default the operator activates the right half; `activate_left` has it take our gate. Its
    `approximate` is 1 for tanh, 0 for none. The backward pass is our own: the meta kernel of
    `npu_geglu_grad` in torch_npu 2.13 returns two tensors for one, so that tracing would fail.
    """
    if limit is not None:
        ascend.left_to_reference("geglu", "a limit")
        return geglu(x, approximate, limit)
    _check_halves(x)
    out: Tensor = _GeGLU.apply(x, approximate)
    return out


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: Literal["tanh", "none"]) -> Tensor:
        out, gelu = ascend.torch_npu().npu_geglu(
            x, dim=-1, approximate=int(approximate == "tanh"), activate_left=True
        )
        ctx.save_for_backward(x, gelu)
        ctx.approximate = approximate
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, gelu = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dgate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=ctx.approximate)
        return torch.cat((dgate, grad * gelu), dim=-1), None


def _check_halves(x: Tensor) -> None:
    ascend.require_one_dtype("a gated activation", x=x)
    if x.shape[-1] % 2:
        raise ValueError(f"a width of {x.shape[-1]} does not hold a gate and an up half")


def _halves(x: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, dim=-1)
    if limit is None:
        return gate, up
    return gate.clamp(max=limit), up.clamp(-limit, limit)
