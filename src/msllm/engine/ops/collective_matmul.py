"""Products with a weight that is spread over ranks, and the communication that goes with them.

The three forms of tensor parallelism, each beside one torch_npu operator that overlaps the two
(MC2). Weights are [n, k] as linear layers hold them; the group's ranks hold different slices. Not
yet what Megatron's linears call: its layers keep their own communication.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from msllm.engine.ops import ascend

_WORLDS = (2, 4, 8, 16)


def matmul_all_reduce(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks of x @ weight.T, on each: [m, k] and [n, k] -> [m, n].

    A linear layer that is cut along its inputs. Its gradients need no communication.
    """
    out: Tensor = _MatmulAllReduce.apply(x, weight, group, False)
    return out


def matmul_all_reduce_npu(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `matmul_all_reduce`, by `npu_mm_all_reduce_base(x1, x2, hcom)`; bf16 or fp16.

    x2 is the weight transposed, [k, n]; hcom the name of the group's HCCL communicator; the only
    `reduce_op` is "sum".
    """
    _check(x, weight, group)
    out: Tensor = _MatmulAllReduce.apply(x, weight, group, True)
    return out


def all_gather_matmul(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks times this rank's weight: [m, k] and [n, k] -> [m ranks, n].

    A linear layer cut along its outputs under sequence parallelism. The gathered rows are not
    kept but gathered again for the weight's gradient; dx is scattered while it is summed.
    """
    out: Tensor = _AllGatherMatmul.apply(x, weight, group, False)
    return out


def all_gather_matmul_npu(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `all_gather_matmul`, by `npu_all_gather_base_mm`; bf16 or fp16, k in [256, 65535).

    The operator takes 2, 4, 8 or 16 ranks, and `input` not transposed. Its second result, the
    gathered rows, is dropped (`gather_output`). dx comes from `npu_mm_reduce_scatter_base`, which
    has the same limits for n.
    """
    _check(x, weight, group, limited=True)
    out: Tensor = _AllGatherMatmul.apply(x, weight, group, True)
    return out


def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over ranks of x @ weight.T: [m, k], [n, k] -> [m / ranks, n].

    A linear layer cut along its inputs under sequence parallelism.
    """
    out: Tensor = _MatmulReduceScatter.apply(x, weight, group, False)
    return out


def matmul_reduce_scatter_npu(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `matmul_reduce_scatter`, by `npu_mm_reduce_scatter_base`.

    Limits are those of `all_gather_matmul_npu`, whose operator makes dx and the gathered gradients
    at once.
    """
    _check(x, weight, group, limited=True)
    if x.shape[0] % group.size():
        raise ValueError(f"{x.shape[0]} rows do not divide by the group's {group.size()} ranks")
    out: Tensor = _MatmulReduceScatter.apply(x, weight, group, True)
    return out


def _check(x: Tensor, weight: Tensor, group: dist.ProcessGroup, limited: bool = False) -> None:
    ascend.require_one_dtype("a product over ranks", x=x, weight=weight)
    ascend.require_dtype("a product over ranks", "x", x, torch.bfloat16, torch.float16)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    if not limited:
        return
    if group.size() not in _WORLDS:
        raise ValueError(f"the operator takes {_WORLDS} ranks, not {group.size()}")
    if not all(256 <= size < 65535 for size in weight.shape):
        raise ValueError(f"weight {tuple(weight.shape)} must have sizes in [256, 65535)")


class _MatmulAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any, fused: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        if fused:
            out: Tensor = ascend.torch_npu().npu_mm_all_reduce_base(
                x, weight.t(), _communicator(group), reduce_op="sum"
            )
            return out
        out = x @ weight.t()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, None, None


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any, fused: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.fused = group, fused
        return _gathered_product(x, weight.t(), group, fused, keep=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dx = _scattered_product(grad, weight, ctx.group, ctx.fused)
        return dx, grad.t() @ _gather(x, ctx.group), None, None


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any, fused: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.fused = group, fused
        return _scattered_product(x, weight.t(), group, fused)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dx, gathered = _gathered_product(grad, weight, ctx.group, ctx.fused, keep=True)
        return dx, gathered.t() @ x, None, None


def _gathered_product(
    x: Tensor, matrix: Tensor, group: Any, fused: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """All ranks' rows times `matrix` [k, n], and those rows (where kept)."""
    if fused:
        out, gathered = ascend.torch_npu().npu_all_gather_base_mm(
            x.contiguous(), matrix, _communicator(group), group.size(), gather_output=keep
        )
        return out, gathered
    gathered = _gather(x, group)
    return gathered @ matrix, gathered


def _scattered_product(x: Tensor, matrix: Tensor, group: Any, fused: bool) -> Tensor:
    """This rank's rows of the sum over ranks of x @ `matrix` [k, n]."""
    if fused:
        out: Tensor = ascend.torch_npu().npu_mm_reduce_scatter_base(
            x.contiguous(), matrix, _communicator(group), group.size(), reduce_op="sum"
        )
        return out
    product = x @ matrix
    out = product.new_empty(product.shape[0] // group.size(), product.shape[1])
    dist.reduce_scatter_tensor(out, product, group=group)
    return out


def _gather(x: Tensor, group: Any) -> Tensor:
    gathered = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _communicator(group: Any) -> str:
    """Name of the group's HCCL communicator, made at its first use."""
    backend = group._get_backend(torch.device("npu"))
    name: str = backend.get_hccl_comm_name(dist.get_rank())
    return name
