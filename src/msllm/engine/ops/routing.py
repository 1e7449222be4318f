"""Choices of experts and their weights, from a router's logits `[t, e]`: both `[t, k]`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from msllm.engine.ops import ascend
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


def by_scores_npu(logits: Tensor, moe: MoE, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `by_scores`, by `npu_moe_gating_top_k` in fp32: experts int64, weights fp32, `[t, k]`.

    The operator's `norm_type` is 1 for sigmoids, whose chosen scores it always divides by their
    sum, and 0 for a softmax, whose it never does: other choices go to the reference. Groups are
    judged by their best expert (`group_select_mode` 0) or best two (1), and hold more than two;
    at most 2048 experts. `bias` only selects. Documented for inference: the backward pass is our
    own, from the scores that `out_flag` returns (the operator's has no meta kernel).
    """
    if not _has_kernel(moe, logits.shape[-1]):
        ascend.left_to_reference("by_scores", "this choice of experts")
        return by_scores(logits, moe, bias)
    weights, experts = _ByScores.apply(logits.float(), moe, None if bias is None else bias.float())
    return experts, weights


def _has_kernel(moe: MoE, experts: int) -> bool:
    groups = moe.num_groups or 1
    if moe.norm_topk_prob != (moe.score_function == "sigmoid") or experts > 2048:
        return False
    if groups == 1:
        return True
    padded = -(-experts // groups // 32) * 32  # a group's experts, as the kernel pads them
    return moe.group_best in (1, 2) and experts // groups > 2 and padded * groups <= 2048


class _ByScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, moe: MoE, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, experts, scores = ascend.torch_npu().npu_moe_gating_top_k(
            logits,
            moe.num_experts_per_tok,
            bias=bias,
            k_group=moe.topk_groups or 1,
            group_count=moe.num_groups or 1,
            group_select_mode=int(moe.num_groups is not None and moe.group_best == 2),
            norm_type=int(moe.score_function == "sigmoid"),
            out_flag=True,
            routed_scaling_factor=moe.routed_scaling_factor,
        )
        experts = experts.long()
        ctx.save_for_backward(scores, experts)
        ctx.moe = moe
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        """Softmax p: dx = p (dp - sum(dp p)). Sigmoid, over its sum S: dp = (g - sum(g w)) / S."""
        scores, experts = ctx.saved_tensors
        chosen = scores.gather(1, experts)
        grad = grad * ctx.moe.routed_scaling_factor
        if ctx.moe.score_function == "sigmoid":
            total = chosen.sum(-1, keepdim=True) + 1e-20
            grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
            slope = grad * chosen * (1 - chosen)
            return torch.zeros_like(scores).scatter(1, experts, slope), None, None
        slope = torch.zeros_like(scores).scatter(1, experts, grad * chosen)
        return slope - scores * slope.sum(-1, keepdim=True), None, None


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
