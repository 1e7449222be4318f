"""Root-mean-square and layer norms over the last dimension.

Statistics and the product with the weight are in fp32, the result has x's dtype. Where the norm
sits, and how its weight is sharded, is the layer's matter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from msllm.engine.ops import ascend


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """RMSNorm (arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * weight, like `x` [..., h].

    `zero_centered` weights [h] are stored as the difference from 1 (Gemma). The result is rounded
    to x's dtype once, after the weight, as fused kernels do (transformers' LlamaRMSNorm rounds
    before it as well, which in bf16 may differ in the last bit).

    An own backward pass makes forward and backward 1.2 to 2.4 times as fast on a CPU as torch's
    `rms_norm` or the formula under autograd (fp32 and bf16, widths 64 to 1024), and keeps `x` and
    one number a row instead of four tensors like `x`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(wide) + 1 if zero_centered else weight.to(wide)
    return _RMSNorm.apply(x, scale, eps)


def rms_norm_npu(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """As `rms_norm`, by `npu_rms_norm`, like `x` [..., h] (fp32, bf16 or fp16).

    The operator wants its weight (`gamma`, a plain factor) in x's dtype. Zero-centred weights in
    16 bits would lose all that is finer than 1/256 once 1 is added to them, so those, and weights
    of another dtype than `x`, are computed in fp32 as the reference does. The keyword is
    `epsilon`, its default 1e-6; the second result, 1 / rms in fp32, serves its own backward pass.

    Not used: `npu_add_rms_norm`, which adds the residual first. It has no backward pass of its
    own, and Megatron's layers add the residual in another place than they norm it.

    Raises:
        ValueError: A weight that is not [h]: the operator would norm over other dimensions.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"RMSNorm of {tuple(x.shape)} with a weight of {tuple(weight.shape)}")
    plain = not zero_centered and weight.dtype == x.dtype
    wide = x if plain else x.float()
    scale = weight if plain else weight.float()
    ascend.require_one_dtype("RMSNorm", x=wide, weight=scale)
    if zero_centered:
        scale = scale + 1
    out, _ = ascend.torch_npu().npu_rms_norm(wide, scale, epsilon=eps)
    normed: Tensor = out.to(x.dtype)
    return normed


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """LayerNorm (arXiv:1607.06450): (x - mean) / sqrt(var + eps) * weight + bias, like `x`."""
    if zero_centered:
        weight = weight + 1
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        wide = x.to(scale.dtype)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, rstd)
        return (wide * rstd).mul_(scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With r = rstd: dscale = sum(g x r), dx = r (g scale) - x r^3 mean(g x scale)."""
        x, scale, rstd = ctx.saved_tensors
        h = x.shape[-1]
        rows, g = x.to(scale.dtype).reshape(-1, h), grad.to(scale.dtype).reshape(-1, h)
        r = rstd.view(-1, 1)
        products = g * rows
        # Sums over rows and columns as products with a vector: one pass each.
        dscale = (r.t() @ products).view(h)
        mean = (products @ scale).unsqueeze(-1) / h
        dx = (g * scale).mul_(r).addcmul_(rows, mean * r.pow(3), value=-1)
        return dx.to(x.dtype).view_as(x), dscale, None
