"""The attention reference against an einsum in float64, transformers' eager code, and itself."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msllm.engine.ops.attention import attention


def truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, written out: einsum in float64, and who sees whom pair by pair."""
    q, k, v = q.double(), k.double(), v.double()
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    logits = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    s, t = logits.shape[-2:]
    hidden = [
        [(causal and j > at) or (window is not None and at - j >= window) for j in range(t)]
        for at in range(t - s, t)
    ]
    weights = logits.exp() * ~torch.tensor(hidden)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp().view(1, -1, 1, 1)
    return torch.einsum("bnst,tbnd->sbnd", weights / total, v)


def tensors(s: int, t: int, b: int, n: int, g: int, d: int, dv: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (s, b, n, d), (t, b, g, d), (t, b, g, dv)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def assert_same_with_gradients(
    actual: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float = 2e-5
) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)
    grad = torch.randn(actual.shape, generator=torch.Generator().manual_seed(9))
    ours = torch.autograd.grad(actual, inputs, grad.to(actual.dtype))
    theirs = torch.autograd.grad(expected, inputs, grad.to(expected.dtype))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(
    s=st.integers(1, 24),
    ahead=st.sampled_from([0, 0, 1, 5]),
    b=st.integers(1, 3),
    g=st.integers(1, 3),
    per_group=st.integers(1, 3),
    d=st.sampled_from([4, 8, 16]),
    dv=st.sampled_from([4, 8, 16]),
    causal=st.booleans(),
    window=st.sampled_from([None, None, 1, 2, 7, 40]),
    softcap=st.sampled_from([None, None, 2.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 999),
)
def test_equals_einsum_in_float64(
    s, ahead, b, g, per_group, d, dv, causal, window, softcap, with_sinks, seed
):
    if window is not None:
        causal = True
    q, k, v = inputs = tensors(s, s + ahead, b, g * per_group, g, d, dv, seed)
    sinks = torch.linspace(-1, 1, g * per_group).requires_grad_() if with_sinks else None
    options = {"causal": causal, "window": window, "softcap": softcap, "sinks": sinks}
    actual = attention(q, k, v, scale=0.4, **options)
    assert actual.shape == (s, b, g * per_group, dv)
    expected = truth(q, k, v, scale=0.4, **options)
    assert_same_with_gradients(actual, expected, [*inputs, *([] if sinks is None else [sinks])])


@pytest.mark.parametrize("window", [1, 64, 127, 128, 129, 200, 299, 300, 301])
def test_window_across_blocks(window):
    """Longer than a block of queries, with widths around the block's and the sequence's ends."""
    q, k, v = inputs = tensors(300, 300, 1, 2, 1, 8, 8)
    expected = truth(q, k, v, scale=0.4, window=window)
    assert_same_with_gradients(
        attention(q, k, v, scale=0.4, window=window), expected, inputs, tolerance=1e-4
    )


def test_window_of_queries_at_the_end_of_longer_keys():
    q, k, v = inputs = tensors(200, 330, 1, 2, 2, 8, 8)
    expected = truth(q, k, v, scale=0.4, window=50)
    actual = attention(q, k, v, scale=0.4, window=50)
    assert_same_with_gradients(actual, expected, inputs, tolerance=1e-4)


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 3.0}, {"sinks": True}])
def test_one_query_of_generation_equals_the_last_of_the_whole(options):
    q, k, v = tensors(19, 19, 2, 4, 2, 8, 8)
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    whole = attention(q, k, v, scale=0.3, **options)
    last = attention(q[-1:], k, v, scale=0.3, **options)
    torch.testing.assert_close(last, whole[-1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"window": 6}])
def test_gradcheck(options):
    inputs = [x.detach().double().requires_grad_() for x in tensors(7, 7, 1, 2, 1, 4, 4)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, scale=0.5, **options), inputs
    )


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 3.0}, {"sinks": True}])
def test_bf16_is_close_to_float64(options):
    q, k, v = (x.detach().bfloat16() for x in tensors(64, 64, 2, 4, 2, 16, 16))
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    actual = attention(q, k, v, scale=0.25, **options)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(
        actual.double(), truth(q, k, v, scale=0.25, **options), rtol=2e-2, atol=2e-2
    )


def causal_mask(s: int) -> Tensor:
    return torch.full((s, s), -math.inf).triu(1)[None, None]


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "llama"])
def test_equals_transformers_eager_attention(family):
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss
    from transformers.models.llama.modeling_llama import eager_attention_forward as llama

    q, k, v = inputs = tensors(21, 21, 2, 6, 2, 8, 8)
    sinks = torch.randn(6, requires_grad=True)
    module = SimpleNamespace(num_key_value_groups=3, training=False, sinks=sinks)
    theirs = {"gpt_oss": gpt_oss, "gemma2": gemma2, "llama": llama}[family]
    heads_first = [x.permute(1, 2, 0, 3) for x in inputs]
    options = {"softcap": 1.5} if family == "gemma2" else {}
    expected, _ = theirs(module, *heads_first, causal_mask(21), scaling=0.3, **options)
    if family == "gpt_oss":
        options["sinks"] = sinks
        inputs.append(sinks)
    actual = attention(q, k, v, scale=0.3, **options)
    assert_same_with_gradients(actual, expected.transpose(0, 1), inputs)


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    options=st.sampled_from([{}, {"window": 3}, {"softcap": 2.0}, {"causal": False}]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_packed_equals_separate_sequences(lengths, options, dtype):
    total = sum(lengths)
    q, k, v = inputs = tensors(total, total, 1, 4, 2, 8, 8)
    packed = attention(q, k, v, scale=0.4, cu_seqlens=cumulative(lengths, dtype), **options)
    start, separate = 0, []
    for length in filter(None, lengths):
        piece = slice(start, start + length)
        separate.append(truth(q[piece], k[piece], v[piece], scale=0.4, **options))
        start += length
    assert_same_with_gradients(packed, torch.cat(separate), inputs)


@pytest.mark.parametrize("options", [{}, {"window": 8}, {"softcap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequence_is_bit_equal_whatever_precedes_it(options, dtype):
    """C39: pack A+B and A'+B, of other lengths too, and B's rows and gradients do not change."""
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    b = [x.detach().to(dtype) for x in tensors(33, 33, 1, 4, 2, 16, 16, seed=1)]
    seen = []
    for length, seed in ((17, 2), (17, 3), (40, 4)):
        before = [x.detach().to(dtype) for x in tensors(length, length, 1, 4, 2, 16, 16, seed=seed)]
        q, k, v = packed = [
            torch.cat(pair).requires_grad_() for pair in zip(before, b, strict=True)
        ]
        cu_seqlens = cumulative([length, 33])
        out = attention(q, k, v, scale=0.25, cu_seqlens=cu_seqlens, **options)
        grads = torch.autograd.grad(out, packed, torch.ones_like(out))
        seen.append([out[length:], *(grad[length:] for grad in grads)])
    for other in seen[1:]:
        for one, another in zip(seen[0], other, strict=True):
            assert torch.equal(one, another)


def test_dropout_keeps_the_mean_and_draws_anew():
    q, k, v = tensors(16, 16, 1, 2, 2, 8, 8)
    for options in ({}, {"softcap": 50.0}):
        torch.manual_seed(0)
        draws = torch.stack(
            [attention(q, k, v, scale=0.1, dropout_p=0.5, **options) for _ in range(400)]
        )
        assert not torch.equal(draws[0], draws[1])
        plain = attention(q, k, v, scale=0.1, **options)
        error = (draws.mean(0) - plain).abs() / (draws.std(0) / 400**0.5 + 1e-6)
        assert error.max() < 6


def test_plain_causal_holds_no_square_of_the_sequence():
    """At 8192 tokens the fp32 scores of these two heads would be 512 MiB."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(value, Tensor):
                    largest = max(largest, value.numel())
            return out

    q, k, v = tensors(8192, 8192, 1, 2, 1, 8, 4)
    with Largest():
        attention(q, k, v, scale=0.3)
        packed = attention(q, k, v, scale=0.3, cu_seqlens=cumulative([4096, 4096]))
        attention(q, k, v, scale=0.3, window=64)
    assert packed.shape == (8192, 1, 2, 4)
    assert largest <= 8192 * 2 * 8


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ((4, 4, 1, 3, 2, 8, 8), {}, "do not fit"),
        ((5, 4, 1, 2, 2, 8, 8), {}, "5 queries and 4 keys"),
        ((4, 4, 1, 2, 2, 8, 8), {"window": 0}, "window 0"),
        ((4, 4, 1, 2, 2, 8, 8), {"window": 2, "causal": False}, "window 2"),
        ((4, 4, 1, 2, 2, 8, 8), {"cu_seqlens": [0, 3]}, r"\[0, 3\] must rise from 0 to the 4"),
        ((4, 4, 1, 2, 2, 8, 8), {"cu_seqlens": [1, 4]}, r"\[1, 4\]"),
        ((4, 4, 1, 2, 2, 8, 8), {"cu_seqlens": [0, 3, 2, 4]}, r"\[0, 3, 2, 4\]"),
        ((4, 4, 2, 2, 2, 8, 8), {"cu_seqlens": [0, 4]}, "batch of 1"),
    ],
)
def test_refuses_what_does_not_go_together(shapes, options, message):
    if "cu_seqlens" in options:
        options = {"cu_seqlens": torch.tensor(options["cu_seqlens"])}
    with pytest.raises(ValueError, match=message):
        attention(*tensors(*shapes), scale=1.0, **options)
