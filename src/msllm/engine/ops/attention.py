"""Scaled dot-product attention over heads that are already projected, normed and rotated.

Causal or not, grouped queries, sliding windows, packed sequences, soft-capped logits and sinks.
Projections, rotary embedding and parallelism belong to the layers that call it.

`q` is [s, b, n, d], `k` [t, b, g, d], `v` [t, b, g, dv]: Megatron's layout, with s queries, t keys
(t >= s: the queries are the last s positions), n heads in g groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 128
"""Queries of a block: smaller ones cost more calls than they save work."""

_Core = Callable[[Tensor, Tensor, Tensor, bool, int | None], Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Attention in plain torch: [s, b, n, dv].

    Args:
        q: Queries [s, b, n, d].
        k: Keys [t, b, g, d], n a multiple of g; head h reads group h // (n // g).
        v: Values [t, b, g, dv].
        scale: Factor of the logits.
        causal: Query i sees keys up to i + t - s only.
        window: Keys that a query sees, itself included (needs `causal`).
        softcap: Logits x become softcap * tanh(x / softcap) (Gemma 2, arXiv:2408.00118).
        sinks: One logit a head [n] that takes part in the softmax and has no value (gpt-oss).
        dropout_p: Dropout on the probabilities; pass 0 outside training.
        cu_seqlens: int32 or int64 [sequences + 1], 0 first and s last: the s axis holds packed
            sequences that do not see each other. Needs b = 1 and t = s.

    Raises:
        ValueError: Shapes or options that don't go together.
    """
    check(q, k, v, causal, window)
    if cu_seqlens is not None:
        return _packed(
            q,
            k,
            v,
            cu_seqlens,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
        )
    if window is not None and window >= k.shape[0]:
        window = None
    if softcap is None and sinks is None:
        core: _Core = partial(_sdpa, scale=scale, dropout_p=dropout_p)
        return core(q, k, v, causal, None) if window is None else _blocked(core, q, k, v, window)
    core = partial(_eager, scale=scale, dropout_p=dropout_p, softcap=softcap, sinks=sinks)
    return _blocked(core, q, k, v, window) if causal else core(q, k, v, False, None)


def check(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> None:
    """Refuse, with a ValueError, shapes and options of `attention` that don't go together."""
    if q.shape[2] % k.shape[2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"attention shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}"
        )
    if causal and q.shape[0] > k.shape[0]:
        raise ValueError(
            f"causal attention with {q.shape[0]} queries and {k.shape[0]} keys: the first "
            "queries would see nothing"
        )
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window {window} must be at least 1, and needs causal attention")


def check_packed(q: Tensor, k: Tensor, ends: list[int]) -> None:
    """Refuse, with a ValueError, lengths that don't fit `q` and `k`; `ends` begins with 0."""
    if q.shape[1] != 1 or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"packed sequences need a batch of 1 and as many keys as queries: "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    falls = any(end < start for start, end in itertools.pairwise(ends))
    if ends[0] != 0 or ends[-1] != q.shape[0] or falls:
        raise ValueError(f"cu_seqlens {ends} must rise from 0 to the {q.shape[0]} tokens")


def _packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **options: object) -> Tensor:
    """Each sequence by itself, so that none depends on its neighbours even in the last bit."""
    ends = cu_seqlens.tolist()
    check_packed(q, k, ends)
    lengths = [end - start for start, end in itertools.pairwise(ends) if end > start]
    pieces = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([attention(*piece, **options) for piece in pieces])  # type: ignore[arg-type]


def _blocked(core: _Core, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Blocks of queries against the keys that each sees: with a window, all is linear in s.

    On a CPU, forward and backward of 1024 tokens (8 heads of 64 in 2 groups, fp32) take 28 ms with
    a window of 128 (105 ms in one piece), 32 ms with sinks besides (255), 87 ms with a soft cap
    and no window (297).
    """
    ahead = k.shape[0] - q.shape[0]
    out, start = [], 0
    for block in q.split(_BLOCK):
        end = start + block.shape[0]
        first = 0 if window is None else max(start + ahead - window + 1, 0)
        seen = slice(first, end + ahead)
        out.append(core(block, k[seen], v[seen], True, window))
        start = end
    return torch.cat(out)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    *,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Through torch's fused kernels, which hold no s x t scores.

    On a CPU they take these strided views as fast as any other order of s, b and n, and
    `enable_gqa` beats repeating the groups by a few percent (fp32 and bf16, 256 to 1024 tokens).
    """
    queries, keys, d, dv = q.shape[0], k.shape[0], q.shape[3], v.shape[3]
    is_causal = causal and queries == keys and (window is None or window >= keys)
    mask = None if not causal or is_causal else _visible(queries, keys, window, q.device)
    # The fused CPU kernel wants equal head sizes; zeros beyond the narrower change nothing.
    if dv < d:
        v = F.pad(v, (0, d - dv))
    elif dv > d:
        q, k = F.pad(q, (0, dv - d)), F.pad(k, (0, dv - d))
    out = F.scaled_dot_product_attention(
        q.permute(1, 2, 0, 3),
        k.permute(1, 2, 0, 3),
        v.permute(1, 2, 0, 3),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.permute(2, 0, 1, 3)[..., :dv]


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    *,
    scale: float,
    dropout_p: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """With the scores in memory, in at least fp32: for what the fused kernels don't know."""
    queries, b, n, d = q.shape
    keys, g, dv = k.shape[0], k.shape[2], v.shape[3]
    # [b, g, n/g * s, d] against [b, g, t, d]: the heads of a group are rows of one product.
    grouped = q.permute(1, 2, 0, 3).reshape(b, g, n // g * queries, d)
    scores = grouped @ k.permute(1, 2, 3, 0)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
    scores = scores.view(b, n, queries, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        scores = scores.masked_fill(~_visible(queries, keys, window, q.device), float("-inf"))
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, n, 1, 1).expand(b, n, queries, 1)
        scores = torch.cat([scores, extra], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., :keys]
    probabilities = F.dropout(probabilities, dropout_p).to(v.dtype)
    out = probabilities.reshape(b, g, n // g * queries, keys) @ v.permute(1, 2, 0, 3)
    return out.view(b, n, queries, dv).permute(2, 0, 1, 3)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Mask [s, t], True where query i (at position i + t - s) sees key j."""
    position = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device).unsqueeze(0)
    visible = key <= position
    return visible if window is None else visible & (key > position - window)
