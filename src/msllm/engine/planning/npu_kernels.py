"""What Ascend's fused norm, activations and rotary embedding keep and move, for a traced step.

They are those that `operators_for("npu")` chooses; what their kernels can't do, the references do.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from msllm.engine.ops import operators_for
from msllm.engine.planning.ledger import fused

_reference = operators_for("cpu")


def size_of(*tensors: Tensor) -> int:
    """Bytes of tensors, one after another."""
    return sum(t.numel() * t.element_size() for t in tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """`npu_rms_norm`: keeps its input and one float32 number a row."""
    out: Tensor = _RMSNorm.apply(x, weight + 1 if zero_centered else weight)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        out: Tensor = fused("memory", 0, 2 * size_of(x), lambda: torch.empty_like(x))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        grads = torch.empty_like(weight)
        dx = fused("memory", 0, size_of(x, grad, x), lambda: torch.empty_like(x))
        return dx, grads


def swiglu(x: Tensor, limit: float | None = None, alpha: float | None = None) -> Tensor:
    """`npu_swiglu`: keeps its input."""
    if limit is not None or alpha is not None:
        return _reference.swiglu(x, limit=limit, alpha=alpha)
    out: Tensor = _Gated.apply(x, False)
    return out


def geglu(
    x: Tensor, approximate: Literal["tanh", "none"] = "tanh", limit: float | None = None
) -> Tensor:
    """`npu_geglu`: keeps its input and gelu(gate)."""
    if limit is not None:
        return _reference.geglu(x, approximate=approximate, limit=limit)
    out: Tensor = _Gated.apply(x, True)
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keeps_gate: bool) -> Tensor:
        shape = (*x.shape[:-1], x.shape[-1] // 2)
        kept = [x.new_empty(shape)] if keeps_gate else []
        ctx.save_for_backward(x, *kept)
        out: Tensor = fused("memory", 0, size_of(x) * 3 // 2, lambda: x.new_empty(shape))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0]
        dx = fused("memory", 0, 2 * size_of(x) + size_of(grad), lambda: torch.empty_like(x))
        return dx, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`npu_rotary_mul`, in x's dtype: keeps the tables."""
    r = cos.shape[-1]
    turned = _Turned.apply(x[..., :r], cos, sin)
    out: Tensor = torch.cat((turned, x[..., r:]), dim=-1) if r < x.shape[-1] else turned
    return out


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out: Tensor = fused("memory", 0, 2 * size_of(x), lambda: x.new_empty(x.shape))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dx = fused("memory", 0, 2 * size_of(grad), lambda: grad.new_empty(grad.shape))
        return dx, None, None
