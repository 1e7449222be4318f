"""How a sublayer's output comes back to the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from msllm.engine.megatron.model_config import ModelConfig
from msllm.engine.megatron.modules import Norm

WithBias = tuple[Tensor, Tensor | None]
Add = Callable[[WithBias, Tensor, float], Tensor]


class ScaledResidual(torch.nn.Module):
    """Adds a sublayer's output times a constant (MiniCPM, arXiv:2404.06395, section 3)."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, training: bool, fused: bool) -> Add:
        """Return the function from output and residual, both `[s, b, h]`, to their sum."""
        return self._add

    def _add(self, output: WithBias, residual: Tensor, dropout: float) -> Tensor:
        x, _ = output  # its bias is in it, see `projections.Down`
        return residual + x * self.scale


class NormedResidual(torch.nn.Module):
    """Adds a sublayer's output behind a norm of its own (GLM-4, Gemma 2).

    Stands where Megatron has its bias-dropout-add, and is called as that is.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Add:
        """Return the function from output and residual, both `[s, b, h]`, to their sum."""
        return self._add

    def _add(self, output: WithBias, residual: Tensor, dropout: float) -> Tensor:
        x, _ = output  # its bias is in it, see `projections.Down`
        return residual + self.norm(x)
