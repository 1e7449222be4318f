"""Gated activations against transformers' MLPs and the formulas in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msllm.engine.ops.activation import geglu, swiglu


@settings(max_examples=20, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    f=st.integers(1, 17),
    limit=st.sampled_from([None, 0.5]),
)
def test_swiglu_equals_the_formula(shape, f, limit):
    x = torch.randn(*shape, 2 * f)
    gate, up = x.double()[..., :f], x.double()[..., f:]
    if limit is not None:
        gate, up = gate.minimum(torch.tensor(limit)), up.minimum(torch.tensor(limit))
        up = up.maximum(torch.tensor(-limit))
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(swiglu(x, limit=limit), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_swiglu_with_alpha_is_that_of_gpt_oss(limit):
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(
        hidden_size=8, intermediate_size=9, num_local_experts=1, swiglu_limit=limit
    )
    x = 5 * torch.randn(11, 18)
    alternating = torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)
    expected = GptOssExperts(config)._apply_gate(alternating)
    torch.testing.assert_close(swiglu(x, limit=limit, alpha=1.702), expected)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_geglu_equals_the_formula(approximate, limit):
    x = torch.randn(11, 3, 14)
    gate, up = x.double()[..., :7], x.double()[..., 7:]
    if limit is not None:
        gate, up = gate.clip(max=limit), up.clip(-limit, limit)
    if approximate == "none":
        expected = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    else:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        expected = gate * 0.5 * (1 + torch.tanh(inner)) * up
    actual = geglu(x, approximate=approximate, limit=limit)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_order_of_gate_and_up_is_that_of_transformers(family):
    from transformers import Gemma2Config, LlamaConfig
    from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    mlp = LlamaMLP(LlamaConfig(**sizes)) if family == "llama" else Gemma2MLP(Gemma2Config(**sizes))
    x = torch.randn(5, 8)
    projected = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1)
    gated = swiglu(projected) if family == "llama" else geglu(projected, approximate="tanh")
    torch.testing.assert_close(mlp.down_proj(gated), mlp(x))


@pytest.mark.parametrize("function", [swiglu, geglu])
def test_gradcheck_and_dtype(function):
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x,))
    assert function(x.bfloat16()).dtype == torch.bfloat16
