"""Which experts a token goes to, where Megatron does not know the published way."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from msllm.engine.megatron.model_config import ModelConfig
from msllm.engine.ops.routing import sparsemixer
from msllm.models.architecture import MoE


class Router(TopKRouter):
    """Megatron's router, with the published choice of experts where that is another."""

    config: ModelConfig

    def __init__(self, config: ModelConfig, pg_collection: Any = None):
        super().__init__(config=config, pg_collection=pg_collection)
        moe = config.architecture.moe
        assert moe is not None
        if not moe.router_bias:  # Megatron gives it one where the experts have biases
            self.bias = None
        elif self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Give probabilities and choices, both `[s b, e]`, from logits `[s, b, e]`."""
        moe = self.config.architecture.moe
        assert moe is not None
        if not _is_other(moe):
            return super().routing(logits, padding_mask)
        length, batch, _ = logits.shape
        logits = self.apply_z_loss(logits.flatten(0, 1))
        if moe.score_function == "sparsemixer":
            experts, weights = sparsemixer(logits, moe.router_jitter, self.training)
        else:
            experts, weights = self.config.ops.by_scores(logits, moe, self.expert_bias)
        probs = torch.zeros_like(logits).scatter(1, experts, weights.to(logits.dtype))
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            balanced, scores = compute_routing_scores_for_aux_loss(
                logits, self.topk, self.score_function
            )
            probs = self._apply_seq_aux_loss(probs, scores, balanced, length, batch)
        self._apply_expert_bias(chosen)
        return probs, chosen


def _is_other(moe: MoE) -> bool:
    """Whether Megatron's router differs.

    It renormalizes the sigmoids of two and more experts, and of no single one; and it judges a
    group by as many experts as a token would choose there.
    """
    if moe.score_function == "sparsemixer":
        return True
    if moe.topk_groups and moe.num_experts_per_tok // moe.topk_groups != moe.group_best:
        return True
    return moe.score_function == "sigmoid" and moe.norm_topk_prob != (moe.num_experts_per_tok > 1)


class NoisyExperts(MoELayer):
    """Experts, and their router, whose input is noisy in training (Phi-3.5-MoE)."""

    config: ModelConfig

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Multiply `[s, b, h]` by factors around one, and go on as Megatron does."""
        moe = self.config.architecture.moe
        assert moe is not None
        if self.training:
            low, high = 1 - moe.input_jitter, 1 + moe.input_jitter
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(low, high)
        return super().forward(hidden_states, *args, **kwargs)
