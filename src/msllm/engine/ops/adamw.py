"""AdamW (arXiv:1711.05101) in the fastest form that a device has.

Gradient clipping, sharding of the state and learning-rate schedules lie with the optimizer's
wrappers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def adamw(
    param_groups: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.AdamW:
    """Make torch's own AdamW, with its fused kernel.

    A genuine `torch.optim.AdamW`, since Megatron-core's DistributedOptimizer asks for one and
    reads its state by name: `exp_avg`, `exp_avg_sq`, and a tensor `step`.
    """
    return torch.optim.AdamW(
        param_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
    )
