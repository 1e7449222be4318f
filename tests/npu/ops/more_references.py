"""What further `npu::` operators compute; see `tests.npu.references`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.npu.references import need, reference


@reference
def npu_gather_backward(grad, self_size, dim, index, sparse_grad):
    return grad.new_zeros(self_size).scatter_add(dim, index, grad)


@reference
def npu_grouped_matmul_add_(input, x, weight, group_list, *, transpose_x=True,
                            transpose_weight=False, group_type=2, group_list_type=0):  # fmt: skip
    need(transpose_x and not transpose_weight and group_type == 2, "no other form is known")
    need(x.dtype == weight.dtype and x.dtype in (torch.half, torch.bfloat16), f"of {x.dtype}")
    need(input.dtype == torch.float and group_list.dtype == torch.int64, "fp32 sums, int64 groups")
    ends = group_list.tolist() if group_list_type == 0 else group_list.cumsum(0).tolist()
    need(ends[-1] == x.shape[0], f"{ends} are not the ends of {x.shape[0]}")
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        input[i] += torch.einsum("tk,tn->kn", x[start:end].float(), weight[start:end].float())
    return input


@reference
def npu_ring_attention_update(prev_attn_out, prev_softmax_max, prev_softmax_sum, cur_attn_out,
                              cur_softmax_max, cur_softmax_sum, *, actual_seq_qlen=None,
                              input_layout="SBH", input_softmax_layout=""):  # fmt: skip
    need(input_layout in ("SBH", "TND"), f"layout {input_layout}")
    out, heads = prev_attn_out, prev_softmax_max.shape[1]
    if input_layout == "TND":
        need(actual_seq_qlen.dtype == torch.int64 and actual_seq_qlen[0] == 0, "ends begin with 0")
        need(actual_seq_qlen[-1] == out.shape[0], "ends that are not those of the tokens")
        need(input_softmax_layout == "TND", "softmax by heads is not simulated")

    def log_sum(maximum, total):
        return (maximum.double() + total.double().log())[..., 0]

    before = log_sum(prev_softmax_max, prev_softmax_sum)
    now = log_sum(cur_softmax_max, cur_softmax_sum)
    share = torch.sigmoid(now - before)  # of the current one in the whole
    if input_layout == "SBH":
        share = share.permute(2, 0, 1)
    parts = [x.double().unflatten(-1, (heads, -1)) if x.dim() == 3 and input_layout == "SBH" else
             x.double() for x in (prev_attn_out, cur_attn_out)]  # fmt: skip
    merged = torch.lerp(*parts, share.unsqueeze(-1)).reshape(out.shape).to(out.dtype)
    maximum = torch.maximum(prev_softmax_max, cur_softmax_max)
    whole = torch.logaddexp(before, now) - maximum[..., 0].double()
    return merged, maximum, whole.exp().float().unsqueeze(-1).expand(maximum.shape).contiguous()


@reference
def npu_moe_gating_top_k(x, k, *, bias=None, input_ids=None, tid2eid=None, k_group=1,
                         group_count=1, group_select_mode=0, renorm=0, norm_type=0, out_flag=False,
                         routed_scaling_factor=1.0, eps=1e-20):  # fmt: skip
    need(renorm == 0 and input_ids is None and tid2eid is None, "not simulated")
    need(bias is None or bias.dtype == x.dtype, "a bias of another type")
    need(group_count == 1 or x.shape[1] // group_count > 2, "groups hold more than two")
    scores = x.float().sigmoid() if norm_type == 1 else x.float().softmax(-1)
    ranked = scores if bias is None else scores + bias.float()
    rows = []
    for row in ranked:  # a token at a time, as written
        groups = [sorted(g.tolist(), reverse=True) for g in row.chunk(group_count)]
        worth = [g[0] + (g[1] if group_select_mode == 1 else 0.0) for g in groups]
        best = sorted(range(group_count), key=lambda i: -worth[i])[:k_group]
        size = row.numel() // group_count
        open_to = [e for e in range(row.numel()) if e // size in best]
        rows.append(sorted(open_to, key=lambda e: -float(row[e]))[:k])
    chosen = torch.tensor(rows, dtype=torch.int32)
    weights = scores.gather(1, chosen.long())
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    y = (weights * routed_scaling_factor).to(x.dtype)
    return y, chosen, scores if out_flag else torch.empty(0)


@reference
def npu_mm_all_reduce_base(x1, x2, hcom, *, reduce_op="sum", **options):
    need(reduce_op == "sum" and bool(hcom), "an unknown reduction")
    out = x1.float() @ x2.float()
    dist.all_reduce(out)
    return out.to(x1.dtype)


@reference
def npu_all_gather_base_mm(input, x2, hcom, world_size, *, gather_output=True, **options):
    need(world_size == dist.get_world_size() and 256 <= x2.shape[0] < 65535, "sizes")
    need(input.is_contiguous() and bool(hcom), "rows are not transposed")
    gathered = input.new_empty(input.shape[0] * world_size, input.shape[1])
    dist.all_gather_into_tensor(gathered, input)
    out = (gathered.float() @ x2.float()).to(input.dtype)
    return out, gathered if gather_output else torch.empty(0, dtype=input.dtype)


@reference
def npu_mm_reduce_scatter_base(input, x2, hcom, world_size, *, reduce_op="sum", **options):
    need(world_size == dist.get_world_size() and 256 <= x2.shape[0] < 65535, "sizes")
    need(input.is_contiguous() and input.shape[0] % world_size == 0 and bool(hcom), "rows")
    whole = input.float() @ x2.float()
    dist.all_reduce(whole)
    return whole.chunk(world_size)[dist.get_rank()].to(input.dtype)
