"""Attention over some keys merged with that over others is attention over all of them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msllm.engine.ops.attention import attention
from msllm.engine.ops.ring_attention import merge_attention


def attended(q, k, v, dtype):
    """Output [s, b, n d], maxima and sums [b, n, s, 8] of q [s, b, n, d] over k and v."""
    logits = torch.einsum("sbnd,tbnd->bnst", q, k)
    maxima = logits.amax(-1, keepdim=True)
    weights = (logits - maxima).exp()
    sums = weights.sum(-1, keepdim=True)
    out = torch.einsum("bnst,tbnd->sbnd", weights / sums, v).flatten(2)
    return out.to(dtype), *(x.float().expand(*x.shape[:-1], 8).clone() for x in (maxima, sums))


@settings(max_examples=25, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    s=st.integers(1, 5),
    b=st.integers(1, 2),
    n=st.integers(1, 3),
    packed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.sampled_from([1.0, 30.0]),
)
def test_pieces_equal_the_whole(pieces, s, b, n, packed, dtype, spread):
    b = 1 if packed else b
    t, d = sum(pieces), 4
    q = torch.randn(s, b, n, d, dtype=torch.float64) * spread
    k, v = (torch.randn(t, b, n, d, dtype=torch.float64) for _ in range(2))
    parts = [
        attended(q, *each, dtype) for each in zip(k.split(pieces), v.split(pieces), strict=True)
    ]
    cu_seqlens = None
    if packed:
        parts = [
            (out.view(s, n, d), *(x[0].transpose(0, 1) for x in softmax)) for out, *softmax in parts
        ]
        cu_seqlens = torch.tensor([0, s])
    whole = parts[0]
    for part in parts[1:]:
        whole = merge_attention(whole, part, cu_seqlens)
    expected = attention(q, k, v, scale=1.0, causal=False).view(whole[0].shape)
    assert whole[0].dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(whole[0].double(), expected, rtol=tolerance, atol=tolerance)
    _, *softmax = attended(q, k, v, dtype)
    for ours, theirs in zip(whole[1:], softmax, strict=True):
        theirs = theirs[0].transpose(0, 1) if packed else theirs
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
