"""Choices of experts against transformers' routers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=40, deadline=None)
@given(
    sigmoid=st.booleans(),
    renormalized=st.booleans(),
    groups=st.sampled_from([None, (2, 1, 1), (3, 2, 2), (4, 3, 2)]),
    chosen=st.integers(1, 4),
    biased=st.booleans(),
    seed=st.integers(0, 999),
)
def test_choices_equal_a_loop_over_tokens(sigmoid, renormalized, groups, chosen, biased, seed):
    """Groups are (number, kept, experts that a group is judged by)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, EXPERTS, generator=generator, requires_grad=True)
    bias = torch.randn(EXPERTS, generator=generator) / 4 if biased else None
    number, kept, judged = groups or (1, 1, 1)
    moe = MoE(
        num_experts=EXPERTS,
        num_experts_per_tok=chosen,
        intermediate_size=8,
        score_function="sigmoid" if sigmoid else "softmax",
        norm_topk_prob=renormalized,
        num_groups=groups and number,
        topk_groups=groups and kept,
        group_best=judged,
        routed_scaling_factor=1.5,
    )
    experts, weights = by_scores(logits, moe, bias)
    size = EXPERTS // number
    for token, found, weight in zip(logits.double(), experts, weights, strict=True):
        scores = 1 / (1 + (-token).exp()) if sigmoid else token.exp() / token.exp().sum()
        ranked = (scores if bias is None else scores + bias).tolist()
        worth = [-sum(sorted(ranked[size * g : size * (g + 1)])[-judged:]) for g in range(number)]
        best = sorted(range(number), key=worth.__getitem__)[:kept]
        open_to = [e for e in range(EXPERTS) if e // size in best]
        expected = sorted(open_to, key=lambda e: -ranked[e])[:chosen]
        assert found.tolist() == expected
        shares = scores[expected] / (scores[expected].sum() if renormalized else 1)
        torch.testing.assert_close(weight, 1.5 * shares.float(), rtol=1e-5, atol=1e-6)
