"""Two attentions over different keys made one, as context parallelism in a ring needs it.

Each comes as its output, and the maxima and sums of its softmax as `attention_npu.fuse` gives
them. Not differentiable: a ring has a backward pass of its own, from the merged results.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from msllm.engine.ops import ascend

Attended: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Output, maxima and sums. Of a batch: [s, b, n d] and twice fp32 [b, n, s, 8], the 8 being equal
copies. Packed: [t, n, d] and twice fp32 [t, n, 8]."""


def merge_attention(before: Attended, now: Attended, cu_seqlens: Tensor | None = None) -> Attended:
    """Attention over the keys of both: m = max(m1, m2), l = l1 e^(m1 - m) + l2 e^(m2 - m).

    The output is o1 l1 e^(m1 - m) / l + o2 l2 e^(m2 - m) / l, made in fp32, in the dtype of the
    outputs.

    Args:
        before: What is known so far.
        now: The attention of the same queries over other keys.
        cu_seqlens: int64 [sequences + 1] with the leading 0, of packed sequences.

    Raises:
        TypeError: Softmax results that are not fp32, outputs of two dtypes.
        ValueError: Shapes that differ or that don't go with `cu_seqlens`.
    """
    _check(before, now, cu_seqlens)
    (out1, max1, sum1), (out2, max2, sum2) = before, now
    maximum = torch.maximum(max1, max2)
    part1, part2 = sum1 * (max1 - maximum).exp(), sum2 * (max2 - maximum).exp()
    total = part1 + part2
    packed = cu_seqlens is not None
    weighed = _weigh(out1, part1 / total, packed) + _weigh(out2, part2 / total, packed)
    return weighed.to(out1.dtype), maximum, total


def merge_attention_npu(
    before: Attended, now: Attended, cu_seqlens: Tensor | None = None
) -> Attended:
    """As `merge_attention`, by `npu_ring_attention_update`: layout SBH, or TND if packed.

    Packed, the operator wants the lengths as an int64 tensor that begins with 0, where the
    attention itself wants a list without; and softmax results by tokens (`softmax_layout` "TND").
    """
    _check(before, now, cu_seqlens)
    ascend.require_one_dtype("ring attention", before=before[0], now=now[0])
    layout = "SBH" if cu_seqlens is None else "TND"
    out, maximum, total = ascend.torch_npu().npu_ring_attention_update(
        *before,
        *now,
        actual_seq_qlen=cu_seqlens,
        input_layout=layout,
        input_softmax_layout=layout,
    )
    return out, maximum, total


def _check(before: Attended, now: Attended, cu_seqlens: Tensor | None) -> None:
    if any(one.shape != other.shape for one, other in zip(before, now, strict=True)):
        raise ValueError("the two attentions are not of the same queries")
    if before[0].dtype != now[0].dtype:
        raise TypeError(f"the two attentions are {before[0].dtype} and {now[0].dtype}")
    for softmax in (*before[1:], *now[1:]):
        ascend.require_dtype("ring attention", "softmax results", softmax, torch.float32)
        dims = 4 if cu_seqlens is None else 3
        if softmax.dim() != dims or softmax.shape[-1] != 8:
            raise ValueError(f"softmax results {tuple(softmax.shape)} are not [..., 8] of {dims}")
    if cu_seqlens is not None:
        ascend.require_dtype("ring attention", "cu_seqlens", cu_seqlens, torch.int64)


def _weigh(out: Tensor, weights: Tensor, packed: bool) -> Tensor:
    """`out` with each head's `weights` on it, in fp32."""
    if packed:
        return out.float() * weights[..., :1]
    by_head = weights[..., 0].permute(2, 0, 1).unsqueeze(-1)  # [s, b, n, 1]
    return (out.float().unflatten(-1, (by_head.shape[2], -1)) * by_head).flatten(2)
