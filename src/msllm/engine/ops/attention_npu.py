"""Attention by torch_npu's fused kernels: `attention_npu` with the reference's signature.

`fuse` below it is one checked call of `npu_fusion_attention`; context parallelism builds on the
maxima and sums that it also returns. Semantics are those of the operator's documentation in
torch_npu 2.13 (`help(torch_npu.npu_fusion_attention)`); no Ascend device was at hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from msllm.engine.ops import ascend
from msllm.engine.ops.attention import attention, check, check_packed

EVERYTHING = 2**31 - 1
"""The operator's own default of `pre_tockens` and `next_tockens`: no limit."""

_CAUSAL, _BAND = 3, 4
"""Values of sparse_mode, both anchored at the last query and the last key of each sequence."""

_COMPRESSED = 2048
"""The kernel reads this fixed triangle, whatever the lengths, where sparse_mode is 2, 3 or 4."""

_LAYOUTS = {"SBH": 3, "BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3}


def attention_npu(
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
    """As `attention.attention`, by `npu_fusion_attention`: [s, b, n, dv].

    fp32, bf16 and fp16, the same for q, k and v; sinks in any of them. Batches go in layout SBH
    (heads side by side, as Megatron has them), packed sequences in TND with the cumulative ends as
    a list on the host: reading `cu_seqlens` from a device waits for it, once a batch, since the
    layers share the tensor. A causal call takes sparse_mode 3, a window mode 4; without a mask the
    operator attends to everything whatever the mode, so both pass the compressed one.

    The kernel takes values narrower than the keys (dv < d, latent attention); wider ones are met
    by zeros behind queries and keys. A soft cap has no kernel: the reference computes it.

    Raises:
        TypeError: Dtypes that differ or that the kernel lacks.
        ValueError: What the reference refuses, and dropout: no model trained here has any, and the
            kernel's mask would not follow the run's random state.
    """
    if softcap is not None:
        ascend.left_to_reference("attention", "a soft cap")
        return attention(
            q,
            k,
            v,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
            cu_seqlens=cu_seqlens,
        )
    if dropout_p:
        raise ValueError(f"attention dropout {dropout_p} is not supported on an NPU")
    check(q, k, v, causal, window)
    ends = None
    if cu_seqlens is not None:
        ends = _host_ends(cu_seqlens)
        check_packed(q, k, ends)
        ends = sorted(set(ends[1:]) - {0})  # without sequences that hold nothing
    if (wider := v.shape[3] - q.shape[3]) > 0:
        q, k = F.pad(q, (0, wider)), F.pad(k, (0, wider))
    pre, follow, mode, mask = EVERYTHING, EVERYTHING, 0, None
    if causal:
        mask, mode = _triangle(q), _CAUSAL
        if window is not None and window < k.shape[0]:
            mode, pre, follow = _BAND, window - 1, 0
    n, dv = q.shape[2], v.shape[3]
    packed = ends is not None
    out, _, _ = fuse(
        *((x.squeeze(1) if packed else x.flatten(2)) for x in (q, k, v)),
        heads=n,
        layout="TND" if packed else "SBH",
        scale=scale,
        mask=mask,
        sparse_mode=mode,
        pre=pre,
        follow=follow,
        ends=None if ends is None else (ends, ends),
        sinks=sinks,
    )
    return out.view(q.shape[0], q.shape[1], n, dv)


def fuse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    layout: str,
    scale: float,
    mask: Tensor | None = None,
    sparse_mode: int = 0,
    pre: int = EVERYTHING,
    follow: int = EVERYTHING,
    ends: tuple[Sequence[int], Sequence[int]] | None = None,
    sinks: Tensor | None = None,
    softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Call `npu_fusion_attention` once, checked; differentiable in q, k, v and sinks.

    Args:
        q: [s, b, n d] as SBH, [b, s, n d] as BSH, [b, s, n, d] as BSND, [b, n, s, d] as BNSD, or
            [t, n, d] as TND (packed).
        k: As `q`, with its own length and number of heads.
        v: As `k`, with a head size up to that of `k`.
        heads: Heads of `q`.
        layout: One of the five above.
        scale: Factor of the logits; the operator's own default is 1, not 1 / sqrt(d).
        mask: bool or uint8, True (1) where a query does NOT see a key. [s, t], [1 or b, 1, s, t]
            or [b, n, s, t]; [2048, 2048] above the diagonal for sparse_mode 2, 3 and 4.
        sparse_mode: 0 the mask as given, 1 the whole mask, 2 causal from the first query and key,
            3 causal from the last ones, 4 a band from the last ones. Without a mask only 0 says
            what happens: everything is seen.
        pre: The operator's `pre_tockens` (so spelled in this version of the operator): keys that a
            query sees before itself, in mode 4.
        follow: Its `next_tockens`: keys seen behind it.
        ends: For TND, where each sequence's queries and keys end, without the leading 0.
        sinks: [n]; cast to the fp32 that the kernel reads.
        softmax_layout: "TND" has packed maxima and sums lie in memory as their shape says, as
            `ring_attention` needs them; by default they lie head by head.

    Returns:
        The output in q's layout with v's head size, and the softmax's maxima and sums, fp32
        [b, n, s, 8] with 8 equal copies (TND: [t, n, 8]).
    """
    _check_call(q, k, v, heads, layout, mask, sparse_mode, ends, sinks)
    q_ends, k_ends = (None, None) if ends is None else (list(ends[0]), list(ends[1]))
    out, maxima, sums, *_ = ascend.torch_npu().npu_fusion_attention(
        q,
        k,
        v,
        heads,
        layout,
        atten_mask=mask,
        scale=scale,
        pre_tockens=pre,
        next_tockens=follow,
        sparse_mode=sparse_mode,
        actual_seq_qlen=q_ends,
        actual_seq_kvlen=k_ends,
        softmax_layout=softmax_layout,
        sink=None if sinks is None else sinks.float(),
    )
    return out, maxima, sums


def _check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    layout: str,
    mask: Tensor | None,
    sparse_mode: int,
    ends: tuple[Sequence[int], Sequence[int]] | None,
    sinks: Tensor | None,
) -> None:
    ascend.require_one_dtype("fused attention", q=q, k=k, v=v)
    if layout not in _LAYOUTS:
        raise ValueError(f"layout {layout!r} is none of {', '.join(_LAYOUTS)}")
    if {q.dim(), k.dim(), v.dim()} != {_LAYOUTS[layout]}:
        raise ValueError(f"layout {layout} wants {_LAYOUTS[layout]} dimensions, not {q.dim()}")
    axis = layout.find("N")
    if q.shape[axis] != heads if axis > 0 else q.shape[2] % heads:
        raise ValueError(f"{heads} heads do not fit q {tuple(q.shape)} in layout {layout}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"{heads} heads need as many sinks, not {tuple(sinks.shape)}")
    _check_mask(mask, sparse_mode)
    if (ends is None) == (layout == "TND"):
        raise ValueError("the ends of packed sequences go with layout TND, and only with that")
    if ends is not None:
        _check_ends(ends[0], q.shape[0])
        _check_ends(ends[1], k.shape[0])
        if len(ends[0]) != len(ends[1]):
            raise ValueError(f"{len(ends[0])} sequences of queries, {len(ends[1])} of keys")


def _check_mask(mask: Tensor | None, sparse_mode: int) -> None:
    if not 0 <= sparse_mode <= 4:
        raise ValueError(f"sparse_mode {sparse_mode} is none of 0, 1, 2, 3, 4")
    if mask is None:
        if sparse_mode:
            raise ValueError(f"sparse_mode {sparse_mode} without a mask would hide nothing")
        return
    ascend.require_dtype("fused attention", "mask", mask, torch.bool, torch.uint8)
    if sparse_mode >= 2 and mask.shape != (_COMPRESSED, _COMPRESSED):
        raise ValueError(
            f"sparse_mode {sparse_mode} reads the compressed {_COMPRESSED} x {_COMPRESSED} mask, "
            f"not one of {tuple(mask.shape)}"
        )


def _check_ends(ends: Sequence[int], tokens: int) -> None:
    rising = all(a <= b for a, b in itertools.pairwise(ends))
    if not ends or not rising or ends[0] < 0 or ends[-1] != tokens:
        raise ValueError(f"ends {list(ends)} must be cumulative, up to the {tokens} tokens")


_TRIANGLES: dict[torch.device, Tensor] = {}


def _triangle(q: Tensor) -> Tensor:
    """The compressed mask on q's device, made once (4 MiB); not kept where tensors are traced."""
    if type(q) is Tensor and q.device in _TRIANGLES:
        return _TRIANGLES[q.device]
    whole = torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=q.device)
    mask = whole.triu_(1)
    if type(mask) is Tensor:
        _TRIANGLES[q.device] = mask
    return mask


_HOST_ENDS = WeakTensorKeyDictionary()


def _host_ends(cu_seqlens: Tensor) -> list[int]:
    """`cu_seqlens` as a list, read again only if the tensor is another or was written to."""
    ascend.require_dtype("attention", "cu_seqlens", cu_seqlens, torch.int32, torch.int64)
    version, ends = _HOST_ENDS.get(cu_seqlens, (None, None))
    if ends is None or version != cu_seqlens._version:
        ends = cu_seqlens.tolist()
        _HOST_ENDS[cu_seqlens] = (cu_seqlens._version, ends)
    return list(ends)
