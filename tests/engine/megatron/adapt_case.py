"""Does one small thing with Megatron-core that needs a named adaptation.

Usage: adapt_case.py all, or adapt_case.py NAME skip; alone in its job. With `skip` the adaptation
is left out, and the thing must then fail: the script ends with status 3.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import torch

from msllm.engine.device import select_device
from msllm.engine.megatron.adapt import adapt, applied


def eager_functions() -> None:
    from megatron.core.fusions.fused_bias_gelu import bias_gelu

    assert not hasattr(bias_gelu, "_torchdynamo_orig_callable"), "wrapped by torch.compile"


def cuda_runtime() -> None:
    from megatron.core.distributed.param_and_grad_buffer import torch as theirs

    assert theirs.empty(2, device=theirs.cuda.current_device()).device.type == "cpu"
    stream = theirs.cuda.Stream()
    with theirs.cuda.stream(stream):
        stream.wait_stream(theirs.cuda.current_stream())
    theirs.cuda.synchronize()
    theirs.cuda.nvtx.range_push("here")
    theirs.cuda.nvtx.range_pop()
    assert theirs.cuda.max_memory_allocated() == 0
    theirs.cuda.manual_seed(7)
    assert torch.equal(theirs.cuda.get_rng_state(), torch.get_rng_state())


def cuda_factories() -> None:
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    assert ConstantGradScaler(2.0).scale.tolist() == [2.0]
    assert torch.zeros(2).to("cuda").device.type == "cpu"


def cuda_methods() -> None:
    assert torch.ones(2).cuda().tolist() == [1.0, 1.0]
    assert isinstance(torch.nn.Linear(1, 1).cuda(), torch.nn.Linear)


def tensor_type_names() -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 10.0)
    clip_grad_by_total_norm_fp32([weight], max_norm=1.0, total_norm=20.0)
    assert abs(float(weight.grad.norm()) - 1.0) < 1e-3, "gradients were not clipped"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


def rng_tracker() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("a", 5)
    before = torch.get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, torch.rand(2, generator=torch.Generator().manual_seed(5)))


def recompute_without_fp8() -> None:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    x = torch.ones(3, requires_grad=True)
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(torch.sin, x)
    z = y * 2
    checkpoint.discard_output_and_register_recompute(z)
    z.sum().backward()
    assert torch.allclose(x.grad, 2 * torch.cos(torch.ones(3)))


def adam_step() -> None:
    """Loading the distributed optimizer's state, see checkpoint_cases."""
    backend = build()
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        backend.train_step(batch(), 1)
        backend.save(Path(folder))
        backend.load(Path(folder), 1)


def router_gemm() -> None:
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    out = router_gating_linear(torch.ones(2, 3), torch.ones(4, 3), None, torch.float32)
    assert out.tolist() == [[3.0] * 4] * 2


def split_sizes() -> None:
    backend = build("qwen3_moe", {"ep": 1}, alltoall=True)
    from megatron.core.transformer.moe import token_dispatcher

    moved = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert not torch.is_tensor(moved), "all_to_all_single wants no tensor"
    backend.train_step(batch(), 1)


def grouped_matmul() -> None:
    build("qwen3_moe").train_step(batch(), 1)


def rotary() -> None:
    build().train_step(batch(), 1)


def permute() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    from msllm.engine.ops import REFERENCE

    assert token_dispatcher.permute is REFERENCE.permute, "not our operator"
    assert token_dispatcher.unpermute is REFERENCE.unpermute


def collectives_alone() -> None:
    """Timed by torch's own profiler: gloo records each collective that it runs."""
    from torch.profiler import ProfilerActivity, profile

    backend = build()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        backend.train_step(batch(), 1)
    names = {event.key for event in record.key_averages()}
    copies = {name for name in names if "allgather" in name or "reduce_scatter" in name}
    assert not copies, f"whole buffers went to themselves: {sorted(copies)}"


CASES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        eager_functions, cuda_runtime, cuda_factories, cuda_methods, tensor_type_names,
        rng_tracker, recompute_without_fp8, adam_step, router_gemm, split_sizes, grouped_matmul,
        rotary, permute, collectives_alone,
    )
}  # fmt: skip


def build(family: str = "qwen3", layout: dict | None = None, alltoall: bool = False):
    import megatron_case
    from groups import leave

    leave()
    return megatron_case.build({"family": family, "layout": layout or {}})


def batch() -> list[dict[str, torch.Tensor]]:
    tokens = torch.arange(33).unsqueeze(0)
    one = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(1, 32),
        "position_ids": torch.arange(32).unsqueeze(0),
    }
    return [one]


def main() -> int:
    name, skip = sys.argv[1], sys.argv[2:] == ["skip"]
    device = select_device("cpu")
    adapt(device, skip=(name,) if skip else ())
    adapt(device)  # again: harmless
    if not skip:
        for case, function in CASES.items():
            function()
            print(case)
        return 0
    assert name not in applied()
    try:
        CASES[name]()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].name
        print(f"{type(error).__name__} in {where}: {error}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
