"""Frequencies and rotation against transformers' own, for every kind of scaling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved_truth
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half_truth

from msllm.engine.ops.rotary import cos_sin, inverse_frequencies, rotary
from msllm.errors import InputError
from msllm.models.architecture import Rope

HEAD_DIM = 16
SCALINGS = {
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn without original": {"factor": 4.0},
    "yarn without factor": {"factor": None, "original_max_position_embeddings": 32},
    "yarn with attention_factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.0,
    },
    "yarn of DeepSeek": {
        "factor": 40.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn of gpt-oss": {
        "factor": 32.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + i / 10 for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + i for i in range(HEAD_DIM // 2)],
    },
    "longrope without factor": {
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [2.0] * (HEAD_DIM // 2),
    },
    "longrope with attention_factor": {
        "original_max_position_embeddings": 32,
        "attention_factor": 1.25,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [2.0] * (HEAD_DIM // 2),
    },
}


def llama_config(theta, scaling, **extra):
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": theta, **scaling, **extra},
    )


@pytest.mark.parametrize("seq_length", [None, 20, 100, 500])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_equal_transformers(name, theta, seq_length):
    kind = name.split()[0]
    config = llama_config(theta, {"rope_type": kind, **SCALINGS[name]})
    expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq_length)
    rope = Rope(theta=theta, scaling={"type": kind, **SCALINGS[name]})
    actual, factor = inverse_frequencies(rope, HEAD_DIM, 128, seq_length)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected.float(), rtol=2e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-9)


@pytest.mark.parametrize(("length", "factor"), [(20, 1.2), (100, 1.3)])
def test_scales_of_short_and_long_sequences_are_those_of_phimoe(length, factor):
    from transformers import PhimoeConfig
    from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

    scaling = SCALINGS["longrope"] | {"short_mscale": 1.2, "long_mscale": 1.3}
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **scaling}
    config = PhimoeConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rope_parameters=parameters,
    )
    cos, sin = PhimoeRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    expected = (cos**2 + sin**2).sqrt()
    torch.testing.assert_close(expected, torch.full_like(expected, factor))
    rope = Rope(scaling={"type": "longrope", **scaling})
    assert inverse_frequencies(rope, HEAD_DIM, 128, length)[1] == factor


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_partial_rotation_equals_transformers(kind):
    config = llama_config(1e4, {"rope_type": kind, **SCALINGS[kind]}, partial_rotary_factor=0.5)
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    rope = Rope(theta=1e4, partial_factor=0.5, scaling={"type": kind, **SCALINGS[kind]})
    actual, _ = inverse_frequencies(rope, HEAD_DIM, 128)
    assert actual.shape == (HEAD_DIM // 4,)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("scaling", [None, {"type": "default"}])
def test_plain_tables_equal_transformers(scaling):
    module = LlamaRotaryEmbedding(llama_config(5e5, {"rope_type": "default"}))
    positions = torch.arange(100)
    expected = module(torch.zeros(1), positions[None])
    inv_freq, factor = inverse_frequencies(Rope(theta=5e5, scaling=scaling), HEAD_DIM, 128)
    actual = cos_sin(inv_freq, positions, factor)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == (100, 1, 1, HEAD_DIM)
        torch.testing.assert_close(ours[:, 0, 0], theirs[0], rtol=0, atol=1e-6)


def test_attention_factor_multiplies_both_tables():
    inv_freq = torch.tensor([1.0, 0.1])
    plain, scaled = (cos_sin(inv_freq, torch.arange(5), factor) for factor in (1.0, 1.5))
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(one * 1.5, other)


@pytest.mark.parametrize("interleaved", [False, True])
@settings(max_examples=15, deadline=None)
@given(s=st.integers(1, 20), b=st.integers(1, 3), n=st.integers(1, 3), per_batch=st.booleans())
def test_rotation_equals_transformers(interleaved, s, b, n, per_batch):
    x = torch.randn(s, b, n, HEAD_DIM, requires_grad=True)
    positions = torch.randint(0, 1000, (b, s) if per_batch else (s,))
    inv_freq, factor = inverse_frequencies(Rope(), HEAD_DIM, 4096)
    actual = rotary(x, *cos_sin(inv_freq, positions, factor, interleaved), interleaved)

    angles = positions.expand(b, s)[..., None] * inv_freq
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    rotate = interleaved_truth if interleaved else half_truth
    heads_first = x.permute(1, 2, 0, 3)
    expected, _ = rotate(heads_first, heads_first, angles.cos(), angles.sin())
    expected = expected.permute(2, 0, 1, 3)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(actual)
    ours, theirs = (torch.autograd.grad(out, x, grad)[0] for out in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_dimensions_beyond_the_rotated_ones_stay(interleaved):
    x = torch.randn(6, 2, 3, HEAD_DIM)
    inv_freq, _ = inverse_frequencies(Rope(partial_factor=0.5), HEAD_DIM, 128)
    tables = cos_sin(inv_freq, torch.arange(6), interleaved=interleaved)
    out = rotary(x, *tables, interleaved)
    half = HEAD_DIM // 2
    assert torch.equal(out[..., half:], x[..., half:])
    torch.testing.assert_close(out[..., :half], rotary(x[..., :half], *tables, interleaved))
    assert not torch.allclose(out[1:, ..., :half], x[1:, ..., :half])


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_distance_alone(interleaved):
    q, k = torch.randn(2, 1, 1, 1, HEAD_DIM, dtype=torch.float64)
    inv_freq, _ = inverse_frequencies(Rope(), HEAD_DIM, 128)

    def product(at, other):
        tables = cos_sin(inv_freq, torch.tensor([at, other]), interleaved=interleaved)
        turned = rotary(torch.cat((q, k)), *tables, interleaved)
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(7, 3), product(57, 53), rtol=1e-5, atol=1e-5)
    assert not torch.isclose(product(7, 3), product(7, 4), rtol=1e-3)


def test_bf16_is_rotated_in_fp32_and_rounded_once():
    x = torch.randn(64, 1, 2, HEAD_DIM).bfloat16()
    inv_freq, _ = inverse_frequencies(Rope(), HEAD_DIM, 128)
    tables = cos_sin(inv_freq, torch.arange(64))
    out = rotary(x, *tables)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rotary(x.float(), *tables).bfloat16())


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "spiral"}, "unknown rope scaling 'spiral'"),
        ({}, "unknown rope scaling None"),
        ({"type": "linear"}, "lacks a parameter.*factor"),
        ({"type": "llama3", "factor": 8.0}, "lacks a parameter.*low_freq_factor"),
        (
            {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "1 factors for 8 frequencies",
        ),
    ],
)
def test_refuses_scaling_that_it_does_not_know(scaling, message):
    with pytest.raises(InputError, match=message):
        inverse_frequencies(Rope(scaling=scaling), HEAD_DIM, 128)


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_refuses_a_missing_context_length(kind):
    scaling = {"type": kind, "factor": 4.0}
    with pytest.raises(InputError, match="lacks a parameter"):
        inverse_frequencies(Rope(scaling=scaling), HEAD_DIM, None)
