"""Tokens gathered by expert, and summed back in their own order.

Both fit the calls of Megatron-core's token dispatchers (`megatron.core.transformer.moe.moe_utils`),
and give what it gives. t tokens of width h, e experts, m rows after the permutation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msllm.engine.ops import ascend


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


def permute_npu(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `permute`, by `npu_moe_token_permute_with_routing_map` where every token has k experts.

    The operator needs just that: as many experts for each token, k = num_out_tokens / t. Megatron
    promises it by an int for `num_out_tokens`, known without looking at the map (the all-to-all
    dispatcher without a capacity). What it counts, it gives as a tensor, and experts of other
    ranks leave unequal rows: those calls, padding and no tokens at all go to the reference.

    tokens and probs are fp32, bf16 or fp16, the same for both, or fp32 probs with bf16 tokens.

    Returns:
        As `permute`, but the last is the operator's: int32 [m], where token i // k, for its
        (i % k)-th expert, has gone. The reference's int64 are token numbers: by the dtype
        `unpermute_npu` knows whose they are.
    """
    t = tokens.shape[0]
    counted = type(num_out_tokens) is int and t > 0
    k, rest = divmod(num_out_tokens, t) if counted and num_out_tokens else (0, 0)
    if drop_and_pad or not k or rest or (probs is not None and not _weighs(probs, tokens)):
        ascend.left_to_reference("permute", "padding, or unequal counts of experts")
        return permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
    ascend.require_one_dtype("permute", tokens=tokens)
    ascend.require_dtype("permute", "routing map", routing_map, torch.bool, torch.int8)
    if routing_map.device.type == "cpu" and not bool((routing_map.sum(1) == k).all()):
        raise ValueError(f"the routing map does not give each of {t} tokens {k} experts")
    rows, row_probs, positions = ascend.torch_npu().npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens
    )
    return rows, None if probs is None else row_probs, positions


def unpermute_npu(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    """As `unpermute`, by `npu_moe_token_unpermute_with_routing_map` for what `permute_npu` gave.

    `sorted_indices` int32 are the operator's, int64 the reference's, which then sums them.

    Raises:
        TypeError: Indices of another dtype, which the kernel would read as int32.
        ValueError: Probabilities without a map, or that the kernel cannot weigh by.
    """
    if sorted_indices.dtype == torch.int64:
        return unpermute(
            permuted_tokens, sorted_indices, restore_shape, probs, routing_map, fused, drop_and_pad
        )
    ascend.require_dtype("unpermute", "indices", sorted_indices, torch.int32)
    ascend.require_one_dtype("unpermute", tokens=permuted_tokens)
    if probs is not None and (routing_map is None or not _weighs(probs, permuted_tokens)):
        raise ValueError(
            "unpermute with probs needs the routing map, and probs of the tokens' dtype or fp32 "
            f"beside bf16: {probs.dtype} with {permuted_tokens.dtype}"
        )
    out: Tensor = ascend.torch_npu().npu_moe_token_unpermute_with_routing_map(
        permuted_tokens,
        sorted_indices,
        list(restore_shape),
        probs=probs,
        routing_map=routing_map,
    )
    return out


def _weighs(probs: Tensor, tokens: Tensor) -> bool:
    """Whether the kernels take probabilities of this dtype along with the tokens'."""
    if probs.dtype == torch.float32 and tokens.dtype == torch.bfloat16:
        return True
    return probs.dtype == tokens.dtype


def _padded_indices(routing_map: Tensor, capacity: int) -> Tensor:
    """For each expert, its tokens in their order and then others: int64 [e, capacity]."""
    routed = routing_map.to(torch.int8).t()
    return routed.argsort(dim=-1, descending=True, stable=True)[:, :capacity].contiguous()
