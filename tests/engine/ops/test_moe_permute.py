"""Permutation against Megatron-core's own unfused functions, values and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.moe import moe_utils

from msllm.engine.ops.moe_permute import permute, unpermute


def routing(tokens, experts, topk, seed):
    """Top-k of random scores: (bool map, probabilities that are 0 where not routed)."""
    scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(topk, dim=-1).indices, True)
    return chosen, scores * chosen


CASES = {
    "tokens": st.integers(1, 12),
    "experts": st.integers(1, 6),
    "topk": st.integers(1, 3),
    "seed": st.integers(0, 99),
}


def round_trip(module, tokens, probs, chosen, in_permute, **options):
    """As Megatron's dispatchers call it: probs either along with the tokens, or at the end."""
    rows, row_probs, indices = module.permute(
        tokens, chosen, probs=probs if in_permute else None, **options
    )
    if in_permute:
        restored = module.unpermute(
            rows * row_probs.unsqueeze(-1), indices, restore_shape=tokens.shape
        )
    else:
        assert row_probs is None
        restored = module.unpermute(
            rows,
            indices,
            restore_shape=tokens.shape,
            probs=probs,
            routing_map=chosen,
            drop_and_pad=options.get("drop_and_pad", False),
        )
    return rows, row_probs, indices, restored


class Ours:
    permute = staticmethod(permute)
    unpermute = staticmethod(unpermute)


def assert_same_as_megatron(tokens, probs, chosen, in_permute, **options):
    tokens, probs = tokens.requires_grad_(), probs.requires_grad_()
    ours = round_trip(Ours, tokens, probs, chosen, in_permute, **options)
    theirs = round_trip(moe_utils, tokens, probs, chosen, in_permute, **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    grad = torch.randn(ours[-1].shape).to(ours[-1].dtype)
    for one, other in zip(
        *(torch.autograd.grad(x[-1], (tokens, probs), grad) for x in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("in_permute", [True, False])
@settings(max_examples=20, deadline=None)
@given(**CASES)
def test_round_trip_equals_megatron(in_permute, tokens, experts, topk, seed):
    topk = min(topk, experts)
    chosen, probs = routing(tokens, experts, topk, seed)
    assert_same_as_megatron(
        torch.randn(tokens, 5), probs, chosen, in_permute, num_out_tokens=tokens * topk
    )


@pytest.mark.parametrize("in_permute", [True, False])
@settings(max_examples=20, deadline=None)
@given(**CASES)
def test_drop_and_pad_equals_megatron(in_permute, tokens, experts, topk, seed):
    chosen, probs = routing(tokens, experts, min(topk, experts), seed)
    capacity = max(1, tokens // 2)
    assert_same_as_megatron(
        torch.randn(tokens, 5),
        probs,
        chosen,
        in_permute,
        num_out_tokens=capacity * experts,
        drop_and_pad=True,
    )


@pytest.mark.parametrize("in_permute", [True, False])
def test_bf16_tokens_with_fp32_probabilities(in_permute):
    chosen, probs = routing(9, 4, 2, seed=0)
    assert_same_as_megatron(torch.randn(9, 6).bfloat16(), probs, chosen, in_permute)


def test_rows_are_in_order_of_experts_and_then_of_tokens():
    chosen = torch.tensor([[True, False, True], [False, False, True], [True, True, False]])
    tokens = torch.arange(3.0).unsqueeze(1)
    rows, probs, indices = permute(tokens, chosen, probs=torch.arange(9.0).view(3, 3))
    assert indices.tolist() == [0, 2, 2, 0, 1]
    assert rows.flatten().tolist() == [0, 2, 2, 0, 1]
    assert probs.tolist() == [0, 6, 7, 2, 5]


def test_signatures_take_all_that_megatron_passes():
    import inspect

    for ours, theirs in ((permute, moe_utils.permute), (unpermute, moe_utils.unpermute)):
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        )


def test_probabilities_without_a_map_are_refused():
    with pytest.raises(ValueError, match="routing map"):
        unpermute(torch.randn(2, 3), torch.tensor([0, 1]), (2, 3), probs=torch.ones(2, 1))
