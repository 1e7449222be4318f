"""Trains each case given, on the CPU or on a pretended NPU; keeps what came of it.

Usage: training_check.py KIND MODELS OUT SIZES CASE...; each rank writes OUT/CASE.RANK.pt. A case
that fails has its error in the file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from msllm.engine.device import Device, select_device
from tests.engine.megatron.groups import leave
from tests.npu.training import build, train


def simulated(device: Device) -> Any:
    """The simulator with its group: gloo computes what HCCL is asked to."""
    if device.kind != "npu":
        return contextlib.nullcontext()
    device.set_current()
    importlib.import_module("tests.npu.ops.more_references")
    simulator = importlib.import_module("tests.npu.simulator").Simulator()
    dist.init_process_group("cpu:gloo,npu:hccl")
    return simulator


def main() -> None:
    kind, models, out, sizes = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    rank = os.environ.get("RANK", "0")
    device = select_device(kind, int(rank))
    mode = simulated(device)
    for name in sys.argv[5:]:
        found: dict[str, Any]
        try:
            with mode:
                found = train(build(name, models / name, device, json.loads(sizes)))
        except Exception:
            found = {"error": traceback.format_exc(limit=-15)}
        if kind == "npu":
            found |= {"calls": mode.calls.copy(), "fallbacks": sorted(mode.fallbacks)}
            mode.calls.clear()
        torch.save(found, out / f"{name}.{rank}.pt")
        if "error" in found and dist.is_initialized() and dist.get_world_size() > 1:
            raise SystemExit(found["error"])  # the others wait for this rank
        leave()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
