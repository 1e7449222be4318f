"""Products over two ranks against whole ones: the references on the host, torch_npu's simulated."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch import Tensor

from msllm.engine.ops import collective_matmul
from tests.npu.ops import more_references  # noqa: F401
from tests.npu.simulator import Simulator

M, N, K = 6, 256, 320
CALLS = {
    "matmul_all_reduce": ["npu_mm_all_reduce_base"],
    "all_gather_matmul": ["npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"],
    "matmul_reduce_scatter": ["npu_mm_reduce_scatter_base", "npu_all_gather_base_mm"],
}


def whole(name: str, xs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """What each rank should get, as one process computes it."""
    if name == "all_gather_matmul":
        return [torch.cat(xs) @ weight.t() for weight in weights]
    total = sum(x @ weight.t() for x, weight in zip(xs, weights, strict=True))
    assert isinstance(total, Tensor)
    return [total] * 2 if name == "matmul_all_reduce" else list(total.chunk(2))


def expected(name: str, xs: list[Tensor], weights: list[Tensor], slopes: list[Tensor]) -> list:
    """Per rank: the result and the gradients of x and the weight.

    Every rank has the sum of an all-reduce, of which Megatron takes the gradient once.
    """
    leaves = [x.double().requires_grad_() for x in (*xs, *weights)]
    outs = whole(name, leaves[:2], leaves[2:])
    if name == "matmul_all_reduce":
        outs, slopes = outs[:1], slopes[:1]
    pairs = zip(outs, slopes, strict=True)
    loss = sum((out * slope.double()).sum() for out, slope in pairs)
    grads = torch.autograd.grad(loss, leaves)
    outs = whole(name, leaves[:2], leaves[2:])
    return [(outs[i], grads[i], grads[2 + i]) for i in range(2)]


def inputs(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> list[Tensor]:
        return [torch.randn(shape, generator=generator).div(8).to(dtype) for _ in range(2)]

    rows = {"all_gather_matmul": 2 * M, "matmul_reduce_scatter": M // 2}.get(name, M)
    slopes = draw(rows, N)
    if name == "matmul_all_reduce":
        slopes[1] = slopes[0]  # what comes after is the same on all ranks
    return draw(M, K), draw(N, K), slopes


def check(name: str, function: Callable[..., Tensor], dtype: torch.dtype, device: str) -> None:
    rank, tolerance = dist.get_rank(), 1e-5 if dtype == torch.float32 else 3e-2
    xs, weights, slopes = inputs(name, dtype)
    x, weight = (y[rank].detach().to(device).requires_grad_() for y in (xs, weights))
    out = function(x, weight, dist.group.WORLD)
    grads = torch.autograd.grad(out, (x, weight), slopes[rank].to(device))
    for ours, theirs in zip((out, *grads), expected(name, xs, weights, slopes)[rank], strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=tolerance, atol=tolerance)


def check_communicator() -> None:
    """The real backend gives a name by a rank; the stand-ins have no communicator to name."""
    backend = dist.group.WORLD._get_backend(torch.device("npu"))
    assert callable(backend.get_hccl_comm_name)
    named = SimpleNamespace(get_hccl_comm_name=lambda rank: f"of rank {rank}")
    group = SimpleNamespace(_get_backend={torch.device("npu"): named}.__getitem__)
    assert collective_matmul._communicator(group) == f"of rank {dist.get_rank()}"


def main() -> None:
    dist.init_process_group("cpu:gloo,npu:hccl")
    check_communicator()
    with mock.patch.object(collective_matmul, "_communicator", return_value="name"):
        check_all()
    dist.destroy_process_group()


def check_all() -> None:
    for name, calls in CALLS.items():
        check(name, getattr(collective_matmul, name), torch.float32, "cpu")
        for dtype in (torch.bfloat16, torch.float16):
            with Simulator() as simulator:
                check(name, getattr(collective_matmul, f"{name}_npu"), dtype, "npu")
            assert simulator.calls == calls, simulator.calls


if __name__ == "__main__":
    main()
