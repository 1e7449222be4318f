"""AdamW (arXiv:1711.05101) in the fastest form that a device has.

Gradient clipping, sharding of the state and learning-rate schedules lie with the optimizer's
wrappers.

All forms are genuine `torch.optim.AdamW`: Megatron-core's DistributedOptimizer asks for one by
`isinstance`, reads and writes its state as `exp_avg`, `exp_avg_sq` and a one-element tensor `step`
that is equal for all parameters, and keeps the settings of `param_groups` in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

ParamGroups = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


def adamw(
    param_groups: ParamGroups,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.AdamW:
    """Make an AdamW that updates with torch's fused kernel (CPU and CUDA have one).

    Measured on one CPU core, fp32: a step over 10 M parameters takes 7 ms (21 ms in a loop, 47 ms
    with foreach), over 60 M parameters 43 ms (364 and 394 ms).
    """
    optimizer = torch.optim.AdamW(
        param_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
    )
    fuse_adamw(optimizer)
    return optimizer


def fuse_adamw(optimizer: torch.optim.AdamW) -> None:
    """Switch an AdamW that somebody else made to the fused kernel.

    To be called before its first step, and again after loading a state: the choice is a setting of
    the parameter groups, and a state brings its own.
    """
    _choose(optimizer, fused=True, foreach=False)


def adamw_foreach(
    param_groups: ParamGroups,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.AdamW:
    """Make an AdamW that updates all parameters at once, for devices without a fused kernel."""
    optimizer = torch.optim.AdamW(
        param_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
    )
    foreach_adamw(optimizer)
    return optimizer


def foreach_adamw(optimizer: torch.optim.AdamW) -> None:
    """Switch an AdamW that somebody else made to torch's foreach form; see `fuse_adamw`."""
    _choose(optimizer, fused=False, foreach=True)


def _choose(optimizer: torch.optim.AdamW, *, fused: bool, foreach: bool) -> None:
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(fused=fused, foreach=foreach)
