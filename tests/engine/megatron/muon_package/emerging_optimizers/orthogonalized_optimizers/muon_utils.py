"""The quintic Newton-Schulz iteration, on a matrix that may be spread over a group."""

from __future__ import annotations

import torch
import torch.distributed as dist

A, B, C = 3.4445, -4.7750, 2.0315


def newton_schulz_tp(
    x: torch.Tensor,
    steps: int,
    coefficient_type: str,
    tp_group: dist.ProcessGroup,
    partition_dim: int | None = None,
    mode: str = "duplicated",
) -> torch.Tensor:
    assert coefficient_type == "quintic", coefficient_type
    if partition_dim is None:
        return newton_schulz(x, steps)
    assert mode == "duplicated", mode
    size, rank = dist.get_world_size(tp_group), dist.get_rank(tp_group)
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=tp_group)
    whole = newton_schulz(torch.cat(parts, dim=partition_dim), steps)
    return whole.chunk(size, dim=partition_dim)[rank]


def newton_schulz(x: torch.Tensor, steps: int) -> torch.Tensor:
    tall = x.size(0) > x.size(1)
    y = x.t() if tall else x
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.t()
        y = A * y + (B * gram + C * gram @ gram) @ y
    return y.t() if tall else y
