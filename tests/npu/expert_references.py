"""What the `npu::` operators of mixtures of experts compute; see `references`."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.npu.references import need, reference


def _sizes(group_list: Tensor, group_list_type: int, total: int) -> list[int]:
    need(group_list.dtype == torch.int64 and group_list.dim() == 1, "group_list is int64 [groups]")
    counts = (
        group_list if group_list_type == 1 else group_list.diff(prepend=group_list.new_zeros(1))
    )
    sizes = [int(count) for count in counts]
    need(min(sizes) >= 0 and sum(sizes) == total, f"groups of {sizes} do not make up {total}")
    return sizes


@reference
def npu_grouped_matmul(x, weight, *, bias=None, scale=None, offset=None, antiquant_scale=None,
                       antiquant_offset=None, per_token_scale=None, group_list=None,
                       activation_input=None, activation_quant_scale=None,
                       activation_quant_offset=None, split_item=0, group_type=None,
                       group_list_type=0, act_type=0, tuning_config=None, output_dtype=None,
                       x_dtype=None, weight_dtype=None, scale_dtype=None,
                       per_token_scale_dtype=None):  # fmt: skip
    need(bias is None and scale is None and not act_type, "only plain products are simulated")
    need(group_type in (0, 2) and split_item in (2, 3), "only one tensor in and out is simulated")
    (rows,), (matrices,) = x, weight
    need(rows.dtype == matrices.dtype, f"{rows.dtype} times {matrices.dtype}")
    if group_type == 0:  # y[rows of g] = x[rows of g] @ w[g]
        need(rows.shape[1] == matrices.shape[1], f"{rows.shape} times {matrices.shape}")
        pieces = rows.split(_sizes(group_list, group_list_type, rows.shape[0]))
        out = [a.float() @ w.float() for a, w in zip(pieces, matrices, strict=True)]
        return [torch.cat(out).to(rows.dtype)]
    sizes = _sizes(group_list, group_list_type, rows.shape[1])  # y[g] = x[:, g] @ w[g, :]
    need(rows.shape[1] == matrices.shape[0], f"{rows.shape} times {matrices.shape}")
    pairs = zip(rows.split(sizes, 1), matrices.split(sizes), strict=True)
    return [torch.stack([a.float() @ b.float() for a, b in pairs]).to(rows.dtype)]


def _rows_of(routing_map: Tensor) -> tuple[Tensor, Tensor]:
    """Expert and token of each permuted row; each token must have as many."""
    need(routing_map.dtype in (torch.bool, torch.int8), f"a routing map of {routing_map.dtype}")
    per_token = routing_map.bool().sum(1)
    need(bool((per_token == per_token[:1]).all()), "tokens with different numbers of experts")
    return routing_map.bool().t().nonzero(as_tuple=True)


@reference
def npu_moe_token_permute_with_routing_map(
    tokens, routing_map, *, probs=None, num_out_tokens=None, drop_and_pad=False
):
    need(not drop_and_pad, "dropping is not simulated")
    expert, token = _rows_of(routing_map)
    need(num_out_tokens == token.numel(), f"{num_out_tokens} rows asked for, not {token.numel()}")
    wide = probs is not None and (probs.dtype, tokens.dtype) == (torch.float, torch.bfloat16)
    same = probs is None or probs.dtype == tokens.dtype
    need(wide or same, "probs of another type than the tokens")
    permuted = tokens.new_empty(0) if probs is None else probs[token, expert]
    # row sorted_indices[t * k + j] is the j-th of token t
    return tokens[token], permuted, torch.argsort(token, stable=True).int()


@reference
def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad, probs_grad, sorted_indices, routing_map, experts_num, tokens_num,
    drop_and_pad,
):  # fmt: skip
    expert, token = _rows_of(routing_map)
    grad = permuted_token_out_grad
    summed = torch.zeros(tokens_num, grad.shape[1]).index_add(0, token, grad.float())
    dprobs = grad.new_zeros(tokens_num, experts_num)
    if probs_grad is not None and probs_grad.numel():
        dprobs = probs_grad.new_zeros(tokens_num, experts_num)
        dprobs[token, expert] = probs_grad
    return summed.to(grad.dtype), dprobs


@reference
def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens, sorted_indices, restore_shape, *, probs=None, routing_map=None,
    drop_and_pad=False,
):  # fmt: skip
    need(not drop_and_pad, "dropping is not simulated")
    tokens, width = restore_shape
    per_token = permuted_tokens.shape[0] // tokens
    weighed, weights = permuted_tokens.float(), permuted_tokens.new_empty(0)
    if probs is not None:
        expert, token = _rows_of(routing_map)
        weights = probs[token, expert]
        weighed = weighed * weights.float().unsqueeze(-1)
    rows = sorted_indices.long()
    out = weighed[rows].view(tokens, per_token, width).sum(1).to(permuted_tokens.dtype)
    token_of_row = torch.empty_like(sorted_indices)
    token_of_row[rows] = torch.arange(rows.numel(), dtype=torch.int32) // per_token
    return out, sorted_indices.clone(), token_of_row, weights


@reference
def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens, sorted_indices, restore_shape, *, probs=None, routing_map=None,
    drop_and_pad=False,
):  # fmt: skip
    return _npu_moe_token_unpermute_with_routing_map(
        permuted_tokens, sorted_indices, restore_shape, probs=probs, routing_map=routing_map,
        drop_and_pad=drop_and_pad,
    )[0]  # fmt: skip


@reference
def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad, out_index, permuted_token_id, routing_map, permuted_tokens, probs,
    drop_and_pad, restore_shape,
):  # fmt: skip
    # without probs, torch_npu gives sorted_indices for both lists: only this one tells rows
    rows = out_index.long()
    grad = unpermuted_tokens_grad.new_empty(rows.numel(), restore_shape[1])
    grad[rows] = unpermuted_tokens_grad.repeat_interleave(rows.numel() // restore_shape[0], 0)
    if probs is None:
        return grad, grad.new_empty(0)
    expert, token = _rows_of(routing_map)
    dprobs = torch.zeros_like(probs)
    dprobs[token, expert] = (grad.float() * permuted_tokens.float()).sum(-1).to(probs.dtype)
    return (grad.float() * probs[token, expert].float().unsqueeze(-1)).to(grad.dtype), dprobs
