"""Root-mean-square and layer norms over the last dimension.

Statistics and the product with the weight are in fp32, the result has x's dtype. Where the norm
sits, and how its weight is sharded, is the layer's matter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """RMSNorm (arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * weight, like `x` [..., h].

    `zero_centered` weights [h] are stored as the difference from 1 (Gemma).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(wide) + 1 if zero_centered else weight.to(wide)
    return F.rms_norm(x.to(wide), (x.shape[-1],), scale, eps).to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """LayerNorm (arXiv:1607.06450): (x - mean) / sqrt(var + eps) * weight + bias, like `x`."""
    if zero_centered:
        weight = weight + 1
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
