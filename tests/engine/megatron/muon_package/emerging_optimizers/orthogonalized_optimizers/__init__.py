"""Momentum whose update is made orthogonal by a function that the subclass gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def get_muon_scale_factor(rows: int, columns: int, mode: str = "spectral") -> float:
    assert mode == "spectral", mode
    return float(max(rows, columns) ** 0.5)


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        *,
        use_nesterov: bool,
        weight_decay: float,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
    ):
        assert weight_decay_method == "decoupled", weight_decay_method
        self.use_nesterov = use_nesterov
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        defaults = {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, beta = self.state[parameter], group["momentum_beta"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - beta)
        direction = parameter.grad.lerp(momentum, beta) if self.use_nesterov else momentum
        update = self.orthogonalize(parameter, direction)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])
