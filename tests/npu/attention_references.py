"""What `npu::npu_fusion_attention` and its gradient compute; see `references`.

Heads of one sequence are worked on as queries `[b, n, s, d]` against keys and values repeated for
all n heads; layouts are brought to that and back. Softmax is in float32; its maximum and sum are
given as `[b, n, s, 8]` (TND: `[t, n, 8]`), eight copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.npu.references import need, reference

COPIES, COMPRESSED = 8, (2048, 2048)
_TO_BNSD = {"SBH": (1, 2, 0, 3), "BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
_FROM_BNSD = {"SBH": (2, 0, 1, 3), "BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}


@dataclass(frozen=True)
class Options:
    """What both directions are told."""

    heads: int
    layout: str
    mask: Tensor | None
    mode: int
    scale: float
    before: int
    after: int
    query_ends: list[int] | None
    key_ends: list[int] | None
    sink: Tensor | None

    def visible(self, queries: int, keys: int) -> Tensor:
        """True where attention is allowed, `[..., queries, keys]`."""
        if self.mask is None:
            return torch.ones(queries, keys, dtype=torch.bool)
        need(self.mask.dtype in (torch.bool, torch.uint8), f"a mask of {self.mask.dtype}")
        i, j = torch.arange(queries)[:, None], torch.arange(keys)
        if self.mode in (0, 1):
            need(self.mask.shape[-2:] == (queries, keys), f"a mask of {tuple(self.mask.shape)}")
            band = (j - i >= -self.before) & (j - i <= self.after)
            shown = ~self.mask.bool()
            return shown & band if self.mode == 0 else shown
        need(self.mode in (2, 3, 4), f"sparse_mode {self.mode} is not simulated")
        _check_compressed(self.mask)
        ahead = 0 if self.mode == 2 else keys - queries
        if self.mode == 4:
            return (j - i - ahead >= -self.before) & (j - i - ahead <= self.after)
        return j <= i + ahead


def _check_compressed(mask: Tensor) -> None:
    need(mask.shape[-2:] == COMPRESSED, f"modes 2 to 4 take a 2048 x 2048 mask: {mask.shape}")
    corner = mask[..., :8, :8].bool()
    need(bool((corner == torch.ones(8, 8).triu(1).bool()).all()), "not the upper triangle")


def _check(query: Tensor, key: Tensor, value: Tensor, options: Options) -> None:
    need(query.dtype == key.dtype == value.dtype, "queries, keys and values of several types")
    need(query.dtype in (torch.float, torch.half, torch.bfloat16), f"attention of {query.dtype}")
    need((options.query_ends is not None) == (options.layout == "TND"), "lengths go with TND")
    need(options.sink is None or options.sink.dtype == torch.float, "sinks are float32")
    for ends, x in ((options.query_ends, query), (options.key_ends, key)):
        if ends is not None:
            rising = all(a <= b for a, b in itertools.pairwise([0, *ends]))
            need(rising and ends[-1] == x.shape[0], f"{ends} are not the ends of {x.shape[0]}")


def _to_heads(x: Tensor, options: Options, head_size: int) -> Tensor:
    """Any padded layout -> `[b, n, s, d]`, float32."""
    if options.layout in ("SBH", "BSH"):
        need(x.dim() == 3 and x.shape[-1] % head_size == 0, f"{options.layout} of {x.shape}")
        x = x.unflatten(-1, (-1, head_size))
    need(x.dim() == 4, f"{options.layout} of {tuple(x.shape)}")
    return x.permute(_TO_BNSD[options.layout]).float()


def _from_heads(x: Tensor, options: Options, like: Tensor) -> Tensor:
    x = x.permute(_FROM_BNSD[options.layout])
    x = x.flatten(-2) if options.layout in ("SBH", "BSH") else x
    return x.to(like.dtype).contiguous()


def _sequences(options: Options, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each packed sequence's part of tensors `[t, n, d]`, as `[1, n, s, d]`; keys come second."""
    start_q = start_k = 0
    assert options.query_ends is not None
    assert options.key_ends is not None
    for end_q, end_k in zip(options.query_ends, options.key_ends, strict=True):
        spans = (slice(start_q, end_q), slice(start_k, end_k))
        cut = [x[spans[i in (1, 2)]] for i, x in enumerate(tensors)]
        yield tuple(x.float().transpose(0, 1)[None] for x in cut)
        start_q, start_k = end_q, end_k


def _packed(parts: list[Tensor]) -> Tensor:
    return torch.cat([part[0].transpose(0, 1) for part in parts])


def _scores(q: Tensor, k: Tensor, options: Options) -> Tensor:
    need(q.shape[1] == options.heads, f"head_num {options.heads} of {q.shape[1]} heads")
    need(q.shape[1] % k.shape[1] == 0 and q.shape[3] == k.shape[3], "heads that do not fit")
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    hidden = ~options.visible(q.shape[2], k.shape[2])
    return (scores * options.scale).masked_fill(hidden, float("-inf"))


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(q, k, options)
    if options.sink is not None:  # a key without a value
        extra = options.sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, extra), -1)
    top = scores.amax(-1, keepdim=True)
    need(bool(top.isfinite().all()), "a query that sees nothing")
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (weights / total)[..., : k.shape[2]] @ values, top, total


def _backward(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, y: Tensor, top: Tensor, total: Tensor, o: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = (_scores(q, k, o) - top).exp() / total
    repeat = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    mean = (dy * y).sum(-1, keepdim=True)
    dscores = weights * (dy @ values.transpose(-1, -2) - mean) * o.scale
    dk, dv = dscores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ dy
    dk, dv = (x.unflatten(1, (-1, repeat)).sum(2) for x in (dk, dv))
    dsink = torch.zeros(0)
    if o.sink is not None:
        share = (o.sink.view(1, -1, 1, 1) - top).exp() / total
        dsink = -(share * mean).sum((0, 2, 3))
    return dscores @ keys, dk, dv, dsink


@reference
def npu_fusion_attention(query, key, value, head_num, input_layout, pse=None, padding_mask=None,
                         atten_mask=None, scale=1.0, keep_prob=1.0, pre_tockens=2147483647,
                         next_tockens=2147483647, inner_precise=0, prefix=None,
                         actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0,
                         gen_mask_parallel=True, sync=False, softmax_layout="", sink=None,
                         dropout_mask=None, seed=0, offset=0):  # fmt: skip
    need(pse is None and prefix is None and keep_prob == 1.0, "not simulated")
    options = Options(head_num, input_layout, atten_mask, sparse_mode, scale, pre_tockens,
                      next_tockens, actual_seq_qlen, actual_seq_kvlen, sink)  # fmt: skip
    _check(query, key, value, options)
    if input_layout == "TND":
        found = [_forward(*each, options) for each in _sequences(options, query, key, value)]
        out, top, total = (_packed(list(parts)) for parts in zip(*found, strict=True))
        out = out.to(query.dtype)
    else:
        flat = input_layout in ("SBH", "BSH")
        size = query.shape[-1] // head_num if flat else query.shape[-1]
        groups = key.shape[-1] // size if flat else 0
        sizes = (size, size, value.shape[-1] // groups if flat else 0)
        heads = (_to_heads(x, options, d) for x, d in zip((query, key, value), sizes, strict=True))
        out, top, total = _forward(*heads, options)
        out = _from_heads(out, options, query)
    copies = (x.expand(*x.shape[:-1], COPIES).contiguous() for x in (top, total))
    return out, *copies, query.new_empty(0), 0, 0, 0


@reference
def npu_fusion_attention_grad(query, key, value, dy, head_num, input_layout, *, pse=None,
                              padding_mask=None, atten_mask=None, softmax_max=None,
                              softmax_sum=None, softmax_in=None, attention_in=None,
                              scale_value=1.0, keep_prob=1.0, pre_tockens=2147483647,
                              next_tockens=2147483647, inner_precise=0, seed=0, offset=0,
                              numels=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None,
                              sparse_mode=0, gen_mask_parallel=True, sync=False,
                              softmax_layout="", sink=None):  # fmt: skip
    options = Options(head_num, input_layout, atten_mask, sparse_mode, scale_value, pre_tockens,
                      next_tockens, actual_seq_qlen, actual_seq_kvlen, sink)  # fmt: skip
    top, total = softmax_max[..., :1], softmax_sum[..., :1]
    empty = query.new_empty(0)
    if input_layout == "TND":
        cut = _sequences(options, query, key, value, dy, attention_in, top, total)
        *grads, dsinks = zip(*(_backward(*each, options) for each in cut), strict=True)
        packed = [
            _packed(list(g)).to(x.dtype) for g, x in zip(grads, (query, key, value), strict=True)
        ]
        return *packed, empty, torch.stack(dsinks).sum(0)
    flat = input_layout in ("SBH", "BSH")
    size = query.shape[-1] // head_num if flat else query.shape[-1]
    out_size = dy.shape[-1] // head_num if flat else 0
    sizes = (size, size, out_size, out_size, out_size)
    given: tuple[Any, ...] = (query, key, value, dy, attention_in)
    heads = [_to_heads(x, options, d) for x, d in zip(given, sizes, strict=True)]
    dq, dk, dv, dsink = _backward(*heads, top, total, options)
    pairs = ((dq, query), (dk, key), (dv, value))
    return *(_from_heads(d, options, x) for d, x in pairs), empty, dsink
