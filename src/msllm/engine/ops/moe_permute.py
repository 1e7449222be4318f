"""Tokens gathered by expert, and summed back in their own order.

Both fit the calls of Megatron-core's token dispatchers (`megatron.core.transformer.moe.moe_utils`),
and give what it gives. t tokens of width h, e experts, m rows after the permutation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copy each token once for each of its experts, expert by expert.

    Args:
        tokens: [t, h].
        routing_map: bool [t, e], True where a token goes to an expert.
        probs: [t, e], to be permuted along.
        num_out_tokens: m, if the caller knows it; needed by `drop_and_pad`.
        fused: Accepted for the caller's sake: there is one implementation a device.
        drop_and_pad: Every expert gets exactly m / e tokens: those routed to it first, then
            others as padding.

    Returns:
        Tokens [m, h], probs [m] or None, and for each row the number of its token, int64 [m].
    """
    experts = routing_map.shape[1]
    if drop_and_pad and num_out_tokens is not None:
        sorted_indices = _padded_indices(routing_map, num_out_tokens // experts)
        permuted_probs = None if probs is None else probs.t().gather(1, sorted_indices).flatten()
        sorted_indices = sorted_indices.flatten()
    else:
        expert, sorted_indices = routing_map.bool().t().contiguous().nonzero(as_tuple=True)
        permuted_probs = None if probs is None else probs[sorted_indices, expert]
    return tokens.index_select(0, sorted_indices), permuted_probs, sorted_indices


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    """Sum each token's rows, weighted by `probs` where given: [t, h] in the rows' dtype.

    Args:
        permuted_tokens: [m, h].
        sorted_indices: What `permute` returned.
        restore_shape: (t, h).
        probs: [t, e]; needs `routing_map`. In a wider dtype, the sum is made in that.
        routing_map: bool [t, e].
        fused: Accepted for the caller's sake.
        drop_and_pad: As given to `permute`.
    """
    dtype = permuted_tokens.dtype
    if probs is not None:
        if routing_map is None:
            raise ValueError("unpermute with probs needs the routing map")
        if drop_and_pad:
            by_expert = sorted_indices.view(routing_map.shape[1], -1)
            weights = probs.t().gather(1, by_expert).flatten()
        else:
            expert, token = routing_map.bool().t().contiguous().nonzero(as_tuple=True)
            weights = probs[token, expert]
        permuted_tokens = permuted_tokens * weights.unsqueeze(-1)
    out = permuted_tokens.new_zeros(tuple(restore_shape))
    return out.index_add(0, sorted_indices, permuted_tokens).to(dtype)


def _padded_indices(routing_map: Tensor, capacity: int) -> Tensor:
    """For each expert, its tokens in their order and then others: int64 [e, capacity]."""
    routed = routing_map.to(torch.int8).t()
    return routed.argsort(dim=-1, descending=True, stable=True)[:, :capacity].contiguous()
