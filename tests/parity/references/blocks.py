"""What the reference models have in common: a norm, rotations and attention, written out."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


def angles(length: int, size: int, theta: float) -> Tensor:
    """How far each of `size` / 2 pairs is turned at each position: `[length, size / 2]`."""
    speeds = theta ** -(torch.arange(0, size, 2).double() / size)
    return torch.outer(torch.arange(length).double(), speeds)


def stretched(theta: float, factor: float, length: int, trained: int, size: int) -> float:
    """The base of dynamic NTK scaling: it grows where sequences are longer than trained."""
    if length <= trained:
        return theta
    return theta * (factor * length / trained - (factor - 1)) ** (size / (size - 2))


def turn_halves(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate `[b, s, n, d]` where pairs are an element of each half, by angles `[s, d / 2]`."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat(_turn(one, other, turns), dim=-1)


def turn_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate `[b, s, n, d]` where pairs are neighbours, by angles `[s, d / 2]`."""
    return torch.stack(_turn(x[..., 0::2], x[..., 1::2], turns), dim=-1).flatten(-2)


def _turn(one: Tensor, other: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (t.to(one.dtype)[:, None] for t in (turns.cos(), turns.sin()))
    return one * cos - other * sin, one * sin + other * cos


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: queries `[b, s, n, d]`, keys and values `[b, s, g, d]` -> `[b, s, n d]`."""
    shared = q.size(2) // k.size(2)
    k, v = (x.repeat_interleave(shared, dim=2) for x in (k, v))
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / q.size(-1) ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("bnst,btnd->bsnd", weights, v).flatten(2)


def initialize(model: nn.Module, std: float) -> None:
    """Draw matrices with deviation `std`; biases are zero."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
