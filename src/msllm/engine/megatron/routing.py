"""Which experts a token goes to, where Megatron's own router does not know the published way."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from msllm.engine.megatron.model_config import ModelConfig
from msllm.models.architecture import MoE


class Router(TopKRouter):
    """Megatron's router, with the published choice of experts where that is another."""

    config: ModelConfig

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Give probabilities and choices, both `[s b, e]`, from logits `[s, b, e]`."""
        moe = self.config.architecture.moe
        assert moe is not None
        if not _is_other(moe):
            return super().routing(logits, padding_mask)
        length, batch, _ = logits.shape
        logits = self.apply_z_loss(logits.flatten(0, 1))
        experts, weights = by_scores(logits, moe, self.expert_bias)
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
    if moe.topk_groups and moe.num_experts_per_tok // moe.topk_groups != moe.group_best:
        return True
    return moe.score_function == "sigmoid" and moe.norm_topk_prob != (moe.num_experts_per_tok > 1)


def by_scores(logits: Tensor, moe: MoE, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose by sigmoids or the softmax, group-limited, with a bias that only selects.

    Returns:
        The experts of each token and their weights, `[t, k]` each.
    """
    sigmoid = moe.score_function == "sigmoid"
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(dim=-1)
    ranked = scores if bias is None else scores + bias
    if moe.num_groups is not None:
        ranked = _best_groups(ranked, moe)
    experts = ranked.topk(moe.num_experts_per_tok, dim=-1)[1]
    weights = scores.gather(1, experts)
    if moe.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * moe.routed_scaling_factor


def _best_groups(ranked: Tensor, moe: MoE) -> Tensor:
    """Leave only the experts of the groups whose best have the largest sum."""
    assert moe.num_groups is not None
    assert moe.topk_groups is not None
    grouped = ranked.unflatten(-1, (moe.num_groups, -1))
    best = grouped.topk(moe.group_best, dim=-1)[0].sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept = kept.scatter(1, best.topk(moe.topk_groups, dim=-1)[1], True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
