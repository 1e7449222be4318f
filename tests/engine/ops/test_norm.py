"""Norms against torch.nn, transformers and numerical differentiation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msllm.engine.ops.norm import layer_norm, rms_norm

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=3)


def run(function, x, parameters, grad):
    """Output and gradients of fresh leaves."""
    leaves = [x.detach().requires_grad_(), *(p.detach().requires_grad_() for p in parameters)]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_all_close(ours, theirs, tolerance=1e-5):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, h=st.integers(1, 33), scale=st.sampled_from([1e-3, 1.0, 100.0]))
def test_rms_norm_equals_torch(shape, h, scale):
    x, weight = torch.randn(*shape, h) * scale, torch.randn(h)
    grad = torch.randn(*shape, h)
    theirs = torch.nn.RMSNorm(h, eps=1e-5)

    def module(x, weight):
        return torch.func.functional_call(theirs, {"weight": weight}, (x,))

    expected = run(module, x, [weight], grad)
    actual = run(lambda x, w: rms_norm(x, w, 1e-5), x, [weight], grad)
    assert_all_close(actual, expected, tolerance=1e-4)


def test_rms_norm_equals_llama_in_fp32():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(64, eps=1e-6)
    torch.nn.init.normal_(theirs.weight)
    x, grad = torch.randn(9, 3, 64), torch.randn(9, 3, 64)

    def module(x, weight):
        return torch.func.functional_call(theirs, {"weight": weight}, (x,))

    assert_all_close(
        run(lambda x, w: rms_norm(x, w, 1e-6), x, [theirs.weight], grad),
        run(module, x, [theirs.weight], grad),
        tolerance=5e-6,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_centered_rms_norm_equals_gemma(dtype):
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    theirs = Gemma2RMSNorm(64, eps=1e-6).to(dtype)
    torch.nn.init.normal_(theirs.weight, std=0.2)
    x, grad = torch.randn(9, 3, 64, dtype=dtype), torch.randn(9, 3, 64)

    def module(x, weight):
        return torch.func.functional_call(theirs, {"weight": weight}, (x,))

    actual = run(lambda x, w: rms_norm(x, w, 1e-6, zero_centered=True), x, [theirs.weight], grad)
    expected = run(module, x, [theirs.weight], grad)
    assert_all_close(actual, expected, tolerance=5e-6 if dtype == torch.float32 else 2e-2)


def test_rms_norm_in_bf16_rounds_once():
    """Nearer to float64 than half a unit of bf16's last place, with gradients in bf16."""
    x, weight = torch.randn(50, 96).bfloat16(), torch.randn(96).bfloat16()
    out, dx, dweight = run(lambda x, w: rms_norm(x, w, 1e-6), x, [weight], torch.randn(50, 96))
    assert out.dtype == dx.dtype == dweight.dtype == torch.bfloat16
    exact = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-6)
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001).all()


def test_rms_norm_of_an_fp32_weight_and_bf16_activations():
    out = rms_norm(torch.randn(4, 8).bfloat16(), torch.ones(8), 1e-6)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_gradcheck(zero_centered):
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6, zero_centered), (x, weight))


def test_rms_norm_of_strided_input_and_gradient():
    x, weight = torch.randn(6, 5, 16).transpose(0, 1), torch.randn(16)
    grad = torch.randn(6, 5, 16).transpose(0, 1)
    actual = run(lambda x, w: rms_norm(x, w, 1e-6), x, [weight], grad)
    expected = run(lambda x, w: torch.nn.functional.rms_norm(x, (16,), w, 1e-6), x, [weight], grad)
    assert_all_close(actual, expected)


@settings(max_examples=15, deadline=None)
@given(shape=SHAPES, h=st.integers(2, 33), zero_centered=st.booleans(), with_bias=st.booleans())
def test_layer_norm_equals_the_formula_in_float64(shape, h, zero_centered, with_bias):
    x, weight = torch.randn(*shape, h), torch.randn(h)
    bias = torch.randn(h) if with_bias else None
    actual = layer_norm(x, weight, bias, 1e-5, zero_centered)
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    normal = centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normal * (weight.double() + (1 if zero_centered else 0))
    if bias is not None:
        expected = expected + bias.double()
    torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-4)
