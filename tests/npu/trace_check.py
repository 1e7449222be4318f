"""Traces a whole step of each case on `npu:0`: shapes, dtypes, devices and operators, no values.

Usage: trace_check.py MODELS CASE...; prints a JSON object: case -> operators called, or an error.
torch's `fake` process group pretends the job. Where a step reads numbers back on the host, losses
are one, and each expert has `LENGTH` tokens: all cases choose half of their experts for two
sequences.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from msllm.engine.device import Device, select_device
from tests.engine.megatron.groups import leave
from tests.npu.training import LENGTH, batches, build


class Recorder(TorchDispatchMode):
    """Notes `npu::` operators, and aten operators for which torch_npu has no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[str] = set()
        self.fallbacks: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.npu.simulator import has_kernel, on_device

        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            return 1.0 if args[0].dtype.is_floating_point else LENGTH
        if name.startswith("npu::"):
            self.calls.add(name.removeprefix("npu::"))
        if name == "c10d::allreduce_coalesced_":  # has no meta kernel
            return FakeWork().boxed()
        out = func(*args, **(kwargs or {}))
        if name.startswith("aten::") and on_device((args, kwargs, out)) and not has_kernel(func):
            self.fallbacks.add(name)
        return out


def _norm(*_: Any, **__: Any) -> float:
    """For Megatron's, which puts numbers read from tensors into a list: torch dies of that."""
    return 1.0


def _as_they_are(rows: Any, sizes: Any, order: Any, probs: Any = None, **_: Any) -> Any:
    """For Megatron's, which in one process reads from a tensor that the order is right already."""
    return rows, probs


def trace(name: str, folder: Path, device: Device) -> dict[str, Any]:
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        backend = build(name, folder, device, {"distributed_optimizer": False})
        sys.modules["megatron.core.optimizer.optimizer"].get_grad_norm_fp32 = _norm
        dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
        dispatcher.sort_chunks_by_idxs = _as_they_are
        backend.train_step(batches(1), 1)
        devices = {str(p.device) for c in backend.chunks for p in c.parameters()}
    return {
        "calls": sorted(recorder.calls),
        "fallbacks": sorted(recorder.fallbacks),
        "devices": sorted(devices),
    }


def _everybody_says(found: list[Any], said: Any, group: Any = None) -> None:
    """For `all_gather_object`, whose bytes would be a tensor without values."""
    found[:] = [said] * len(found)


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = select_device("npu")
    device.set_current()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    dist.all_gather_object = _everybody_says
    found: dict[str, Any] = {}
    for name in sys.argv[2:]:
        try:
            found[name] = trace(name, Path(sys.argv[1]) / name, device)
        except Exception:
            found[name] = {"error": traceback.format_exc(limit=-15)}
        with contextlib.suppress(Exception):
            leave()
    print(json.dumps(found))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
