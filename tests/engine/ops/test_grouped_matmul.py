"""The grouped product against a loop over experts in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msllm.engine.ops.grouped_matmul import add_weight_gradient, grouped_matmul


def loop(x, weight, counts, trans_b):
    """Row by row, each with the matrix of its group."""
    expert = torch.arange(len(counts)).repeat_interleave(counts)
    matrices = weight.double()[expert]
    return torch.einsum("tk,tnk->tn" if trans_b else "tk,tkn->tn", x.double(), matrices)


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    k=st.integers(1, 9),
    n=st.integers(1, 9),
    trans_b=st.booleans(),
)
def test_equals_a_loop_with_gradients(counts, k, n, trans_b):
    counts = torch.tensor(counts)
    x = torch.randn(int(counts.sum()), k, requires_grad=True)
    weight = torch.randn(len(counts), *((n, k) if trans_b else (k, n)), requires_grad=True)
    actual = grouped_matmul(x, weight, counts, trans_b)
    expected = loop(x, weight, counts, trans_b)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(actual)
    ours = torch.autograd.grad(actual, (x, weight), grad)
    theirs = torch.autograd.grad(expected, (x, weight), grad.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_experts_without_tokens_get_zeros_not_none():
    weight = torch.randn(3, 4, 5, requires_grad=True)
    grouped_matmul(torch.randn(6, 4), weight, torch.tensor([0, 6, 0])).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad[[0, 2]], torch.zeros(2, 4, 5))
    assert weight.grad[1].abs().min() > 0
    weight.grad = None
    grouped_matmul(torch.empty(0, 4), weight, torch.tensor([0, 0, 0])).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(3, 4, 5))


@pytest.mark.parametrize("trans_b", [False, True])
def test_gradcheck(trans_b):
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, 3, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([2, 0, 3])
    assert torch.autograd.gradcheck(lambda x, w: grouped_matmul(x, w, counts, trans_b), (x, weight))


def test_strided_input_weight_and_gradient_in_bf16():
    counts = torch.tensor([4, 1, 3])
    x = torch.randn(6, 8).t().bfloat16().requires_grad_()
    weight = torch.randn(6, 5, 3).permute(2, 0, 1).bfloat16().requires_grad_()
    out = grouped_matmul(x, weight, counts)
    assert out.dtype == torch.bfloat16
    expected = loop(x, weight, counts, trans_b=False)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    grad = torch.randn(5, 8).t().bfloat16()
    ours = torch.autograd.grad(out, (x, weight), grad)
    theirs = torch.autograd.grad(expected, (x, weight), grad.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_only_what_is_asked_for_is_differentiated():
    x = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(2, 3, 5)
    grouped_matmul(x, weight, torch.tensor([1, 3])).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("counts", [[3, 3], [1, 2, 1], [4]])
def test_refuses_counts_that_do_not_fit(counts):
    with pytest.raises(ValueError, match="do not fit"):
        grouped_matmul(torch.randn(4, 3), torch.randn(2, 3, 5), torch.tensor(counts))


@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=5), k=st.integers(1, 5))
def test_weight_gradient_is_added_to_what_is_there(counts, k):
    counts = torch.tensor(counts)
    x = torch.randn(int(counts.sum()), k)
    weight = torch.randn(len(counts), k, 4, requires_grad=True)
    out = loop(x, weight, counts, trans_b=False)
    grad = torch.randn(out.shape)
    (expected,) = torch.autograd.grad(out, weight, grad.double())
    sums = torch.ones_like(weight).detach()
    assert add_weight_gradient(sums, x, grad, counts) is sums
    torch.testing.assert_close(sums, expected + 1, rtol=1e-5, atol=1e-5)
