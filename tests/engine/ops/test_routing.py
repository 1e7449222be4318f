"""Choices of experts against transformers' routers."""

from __future__ import annotations

import pytest
import torch

from msllm.engine.ops.routing import by_scores, sparsemixer
from msllm.models.architecture import MoE

TOKENS, EXPERTS = 50, 12


def dense(experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("chosen", [1, 3, 4])
@pytest.mark.parametrize("renormalized", [True, False])
def test_sigmoids_are_chosen_as_glm_does(groups, kept, chosen, renormalized):
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    torch.manual_seed(0)
    config = Glm4MoeConfig(
        hidden_size=EXPERTS,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=chosen,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=renormalized,
        routed_scaling_factor=2.5,
    )
    router = Glm4MoeTopkRouter(config)
    router.weight.data.copy_(torch.eye(EXPERTS))
    router.e_score_correction_bias.normal_()
    logits = torch.randn(TOKENS, EXPERTS)
    _, weights, experts = router(logits)
    moe = MoE(
        num_experts=EXPERTS,
        num_experts_per_tok=chosen,
        intermediate_size=8,
        score_function="sigmoid",
        norm_topk_prob=renormalized,
        num_groups=groups if groups > 1 else None,
        topk_groups=kept if groups > 1 else None,
        routed_scaling_factor=2.5,
    )
    ours = dense(*by_scores(logits, moe, router.e_score_correction_bias))
    torch.testing.assert_close(ours, dense(experts, weights))


def compared(training: bool) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Experts, weights and the logits' gradient of the first and second choice: theirs, ours."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer as reference

    def theirs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = reference(logits, 0.4, training)
        return experts, weights

    found = []
    for choose in (theirs, lambda logits: sparsemixer(logits, 0.4, training)):
        torch.manual_seed(1)
        logits = (3 + torch.randn(TOKENS, EXPERTS)).requires_grad_()
        experts, weights = choose(logits)
        upstream = torch.linspace(1, 2, TOKENS)[:, None]
        (gradient,) = torch.autograd.grad((weights * upstream).sum(), logits)
        found.append((experts, weights, gradient))
    return found


def test_the_best_experts_are_taken_in_evaluation():
    theirs, ours = compared(training=False)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one, other)


def test_experts_are_drawn_in_training():
    """The second choice's share in a third is drawn from other random numbers than theirs."""
    (experts, weights, gradient), (our_experts, our_weights, our_gradient) = compared(training=True)
    best = compared(training=False)[0][0]
    assert (experts != best).any()  # else nothing was drawn
    torch.testing.assert_close(our_experts[:, 0], experts[:, 0])
    torch.testing.assert_close(our_weights[:, 0], weights[:, 0], atol=1e-4, rtol=0)
    assert our_weights.max() <= 1
    same = (our_experts == experts).all(-1)
    ratio = (our_weights / weights)[same, 1]
    near = [(ratio - expected).abs() < 1e-3 for expected in (1 / 3, 1.0, 3.0)]
    assert torch.stack(near).any(0).all()
    torch.testing.assert_close(our_gradient[same], gradient[same], atol=1e-3, rtol=1e-2)
