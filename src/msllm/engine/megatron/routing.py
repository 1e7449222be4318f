"""Which experts a token goes to, where Megatron does not know the published way."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from msllm.engine.megatron.model_config import ModelConfig
from msllm.models.architecture import MoE

GROUP_BEST = 2
"""Experts of a group whose scores say how good the group is (arXiv:2412.19437)."""


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
            experts, weights = by_sigmoid(logits, moe, self.expert_bias)
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
    if moe.score_function != "sigmoid":
        return moe.score_function == "sparsemixer"
    grouped = moe.topk_groups is not None
    other_groups = grouped and moe.num_experts_per_tok // (moe.topk_groups or 1) != GROUP_BEST
    return other_groups or moe.norm_topk_prob != (moe.num_experts_per_tok > 1)


def by_sigmoid(logits: Tensor, moe: MoE, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose by sigmoids, group-limited, with a bias that only selects: `[t, k]` each."""
    scores = logits.float().sigmoid()
    ranked = scores if bias is None else scores + bias
    if moe.num_groups is not None:
        ranked = _best_groups(ranked, moe)
    experts = ranked.topk(moe.num_experts_per_tok, dim=-1)[1]
    weights = scores.gather(1, experts)
    if moe.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * moe.routed_scaling_factor


def _best_groups(ranked: Tensor, moe: MoE) -> Tensor:
    """Leave only the experts of the groups whose best two have the largest sum."""
    assert moe.num_groups is not None
    assert moe.topk_groups is not None
    grouped = ranked.unflatten(-1, (moe.num_groups, -1))
    best = grouped.topk(GROUP_BEST, dim=-1)[0].sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept = kept.scatter(1, best.topk(moe.topk_groups, dim=-1)[1], True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)


def sparsemixer(logits: Tensor, jitter: float, training: bool) -> tuple[Tensor, Tensor]:
    """Draw a first and then a second expert (arXiv:2409.12136): `[t, 2]` each.

    Outside training the best ones are taken.
    """
    first, first_weight = _draw(logits, logits, jitter, training)
    others = logits.scatter(1, first, -torch.inf)
    second, second_weight = _draw(others, logits, jitter, training)
    return torch.cat((first, second), dim=1), torch.cat((first_weight, second_weight), dim=1)


def _draw(left: Tensor, logits: Tensor, jitter: float, training: bool) -> tuple[Tensor, Tensor]:
    """One expert a token among those near the best one that is left, and its weight: `[t, 1]`.

    A weight is the expert's share. In training, those that are not the best one's count three
    times in four a third, and are differentiated as if they were whole: Heun's third-order
    estimate of a gradient through the drawing.
    """
    best, expert = left.detach().max(dim=-1, keepdim=True)
    far = (best - logits.detach()) / logits.detach().abs().clamp(min=best) > 2 * jitter
    near = left.masked_fill(far, -torch.inf)
    shares = near.softmax(dim=-1)
    if not training:
        return expert, shares.gather(1, expert)
    noise = torch.empty_like(near).exponential_().log()
    drawn = (near.detach() - noise).argmax(dim=-1, keepdim=True)
    weight = shares.gather(1, drawn)
    whole = (drawn == expert) | (torch.rand_like(weight) > 0.75)
    lost = torch.where(whole, 0.0, 2 / 3) * weight.detach()
    return drawn, weight - lost


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
