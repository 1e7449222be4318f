"""Operators for a traced step: what a device's kernels keep and return, without their loops.

The values are nothing; shapes, lifetimes and FLOPs are those of the kernels. Where the number of
rows depends on the data, it is what the caller was told (`num_out_tokens`), never looked at.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from msllm.engine.ops import Operators, operators_for
from msllm.engine.planning import npu_kernels
from msllm.engine.planning.ledger import fused
from msllm.engine.planning.npu_kernels import size_of


def planning_operators(kind: str) -> Operators:
    """Stand-ins for the operators of a kind of device; the others are the references."""
    changes: dict[str, Any] = {
        "permute": permute,
        "unpermute": operators_for("cpu").unpermute,
        "grouped_matmul": grouped_matmul,
    }
    if kind == "npu":
        changes |= {
            "attention": flash_npu,
            "rms_norm": npu_kernels.rms_norm,
            "swiglu": npu_kernels.swiglu,
            "geglu": npu_kernels.geglu,
            "rotary": npu_kernels.rotary,
        }
    elif kind == "cuda":
        changes["attention"] = flash_cuda
    return replace(operators_for("cpu"), **changes)


def flash_npu(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention as `npu_fusion_attention` keeps it: softmax's maximum and sum, eight copies."""
    return _flash(q, k, v, 16, options)


def flash_cuda(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention as FlashAttention keeps it: one logarithm a query and head."""
    return _flash(q, k, v, 1, options)


def _flash(q: Tensor, k: Tensor, v: Tensor, numbers: int, options: dict[str, Any]) -> Tensor:
    """Give `[s, b, n, dv]`; what no kernel has, a soft cap say, is written out by the reference."""
    sinks = options.get("sinks")
    if options.get("softcap") is not None or (sinks is not None and numbers == 1):
        return operators_for("cpu").attention(q, k, v, **options)
    out: Tensor = _Flash.apply(q, k, v, sinks, numbers, options.get("window"))
    return out


def keys_seen(queries: int, keys: int, window: int | None) -> int:
    """Pairs of a query and a key that causal attention looks at, for the last `queries`."""
    first = keys - queries
    seen = [min(first + i + 1, window or keys) for i in (0, queries - 1)]
    if window is None or window >= keys:
        return (seen[0] + seen[1]) * queries // 2
    full = max(0, min(queries, keys - window))  # queries that see a whole window
    growing = queries - full
    return full * window + growing * (2 * first + growing + 1) // 2


class _Flash(torch.autograd.Function):
    """Keeps queries, keys, values, its output and the softmax's figures."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, numbers: int, window: Any
    ) -> Tensor:
        s, b, n, d = q.shape
        pairs = b * n * keys_seen(s, k.shape[0], window)

        def run() -> tuple[Tensor, Tensor]:
            out = q.new_empty(s, b, n, v.shape[3])
            return out, q.new_empty((b, n, s, numbers), dtype=torch.float32)

        moved = size_of(q, k, v) + s * b * n * v.shape[3] * q.element_size()
        out, figures = fused("attention", 2 * pairs * (d + v.shape[3]), moved, run)
        ctx.save_for_backward(q, k, v, out, figures, sinks)
        ctx.pairs = pairs
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, _, sinks = ctx.saved_tensors
        d, dv = q.shape[3], v.shape[3]
        # scores once more, and the products that give dv, dp, dq and dk
        flops = 2 * ctx.pairs * (3 * d + 2 * dv)
        moved = 2 * size_of(q, k, v) + size_of(out, grad)
        found = fused(
            "attention", flops, moved, lambda: tuple(torch.empty_like(t) for t in (q, k, v))
        )
        dsinks = None if sinks is None else torch.empty_like(sinks)
        return (*found, dsinks, None, None)


def grouped_matmul(x: Tensor, weight: Tensor, counts: Any, trans_b: bool = False) -> Tensor:
    """Shapes and lifetimes of `engine.ops.grouped_matmul`; `counts` is not looked at."""
    out: Tensor = _Grouped.apply(x, weight, trans_b)
    return out


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, trans_b: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        columns = weight.shape[1 if trans_b else 2]
        ctx.flops = 2 * x.shape[0] * x.shape[1] * columns

        def run() -> Tensor:
            return x.new_empty(x.shape[0], columns)

        moved = size_of(x, weight) + x.shape[0] * columns * x.element_size()
        out: Tensor = fused("matmul", ctx.flops, moved, run)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        moved = size_of(x, weight, grad)
        found: list[Tensor | None] = [None, None]
        for index, tensor in enumerate((x, weight)):
            if ctx.needs_input_grad[index]:
                like = partial(torch.empty_like, tensor)
                found[index] = fused("matmul", ctx.flops, moved, like)
        return found[0], found[1], None


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`engine.ops.permute` with rows picked from nowhere, `num_out_tokens` of them."""
    assert num_out_tokens is not None
    routing_map.t().contiguous()
    found = torch.empty((2, int(num_out_tokens)), dtype=torch.int64, device=tokens.device)
    expert, sorted_indices = found.unbind(0)
    permuted_probs = None if probs is None else probs[sorted_indices, expert]
    return tokens.index_select(0, sorted_indices), permuted_probs, sorted_indices


def picked(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """Stand in for `values.masked_select(mask)`, which finds `count` elements."""
    found = torch.empty(count, dtype=torch.int64, device=values.device)
    return values.flatten().index_select(0, found)
