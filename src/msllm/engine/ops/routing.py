"""Choices of experts and their weights, from a router's logits `[t, e]`: both `[t, k]`."""

from __future__ import annotations

import torch
from torch import Tensor

from msllm.models.architecture import MoE


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
