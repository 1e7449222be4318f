"""Layouts of tiny models over two processes: trained for real, and traced. Run as a script.

`python truth_cases.py real OUT` in each of two processes, or `python truth_cases.py traced OUT`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from measure import PeakMemory, State, batch, storages
from shapes import SHAPES

from msllm.config import RunConfig
from msllm.engine.layout import Layout
from msllm.models.architecture import MLA, Architecture, MoE

FULL = {"recompute": "full"}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "data": ("qwen3", {}, {"dtype": "bf16"}),
    "tensor": ("llama", {"tp": 2}, {}),
    "tensor-bf16-full": ("qwen3", {"tp": 2}, {"dtype": "bf16", "train": FULL}),
    "pipeline": ("llama", {"pp": 2}, {}),
    "interleaved": ("llama-4", {"pp": 2, "vpp": 2}, {}),
    "experts": ("moe", {"ep": 2}, {}),
    "experts-tensor": ("moe", {"tp": 2, "ep": 2}, {"train": FULL}),
    "experts-gathered": ("moe", {"ep": 2}, {"moe": {"dispatcher": "allgather"}}),
    "latent": ("deepseek", {"pp": 2}, {}),
}


def shape(name: str) -> Architecture:
    fields = dict(SHAPES[name.removesuffix("-4")])
    if name.endswith("-4"):
        fields["num_layers"] = 4
    for part, kind in (("moe", MoE), ("mla", MLA)):
        if part in fields:
            fields[part] = kind(**fields[part])
    return Architecture(**fields)


def case(name: str) -> tuple[Architecture, Layout, RunConfig]:
    model, sizes, settings = CASES[name]
    run = RunConfig.model_validate(
        {
            "model": "m", "device": "cpu", "dtype": "fp32", "layout": sizes,
            "launch": {"npus": 2}, "data": {"seq_length": 256}, **settings,
            "train": {"micro_batch": 2, "global_batch": 8, **settings.get("train", {})},
        }
    )  # fmt: skip
    return shape(model), Layout.from_world(run.layout, 2), run


def keyed(collectives: Counter[Any]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (name, group, size), times in collectives.items():
        found[f"{name} {group}"] += size * times
    return dict(found)


def trained(name: str) -> dict[str, Any]:
    """What one rank of a real job holds and sends in its second step."""
    import torch

    from msllm.engine.device import select_device
    from msllm.engine.megatron.backend import MegatronBackend
    from msllm.engine.megatron.step import run_batches
    from msllm.engine.planning import memory
    from msllm.engine.planning.held import group_names
    from msllm.engine.planning.ledger import Ledger

    architecture, layout, run = case(name)
    torch.manual_seed(0)
    backend = MegatronBackend(architecture, layout, run, select_device("cpu"))
    steps = [batch(architecture, run) for _ in range(memory.micro_batches(layout, run))]
    backend.train_step(steps, 1)
    states = [State(backend, chunk) for chunk in backend.chunks]
    held = [tensor for state in states for tensor in state.all()]
    buffers = [b for c in backend.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    own = storages(p for state in states for p in state.parameters)
    mains = [p for p in states[0].mains if p.untyped_storage().data_ptr() not in own]
    ledger = Ledger([], group_names())
    with PeakMemory(held) as peak, ledger:
        run_batches(backend.chunks, steps, torch.device("cpu"), forward_only=False)
    gathering = Ledger([], group_names())
    with gathering:
        for chunk in backend.chunks:
            chunk.start_param_sync(force_sync=True)
    return {
        "parameters": sum(storages(p for s in states for p in s.parameters).values()),
        "gradients": sum(storages(b.grad_data for b in buffers).values()),
        "main parameters": State.size(mains),
        "optimizer state": State.size(states[0].moments),
        "peak": peak.peak,
        "step": keyed(ledger.record.collectives),
        "gathering": keyed(gathering.record.collectives),
    }


def noted() -> dict[str, int]:
    """What a ledger notes of collectives over two ranks, of messages whose sizes are known."""
    import torch
    import torch.distributed as dist

    from msllm.engine.planning.ledger import Ledger

    ledger = Ledger([], {dist.group.WORLD.group_name: "two"})
    one, two = torch.ones(10), torch.ones(20)
    with ledger:
        dist.all_reduce(one)
        dist.broadcast(two, 0)
        dist.all_gather_into_tensor(two, one)
        dist.reduce_scatter_tensor(one, two)
        dist.all_to_all_single(two, torch.ones(20))
    return keyed(ledger.record.collectives)


def real(out: str) -> None:
    from groups import leave

    from msllm.engine.device import Device
    from msllm.engine.megatron.adapt import adapt

    adapt(Device("cpu"))
    reports = {}
    for name in CASES:
        reports[name] = trained(name)
        leave()
    reports["noted"] = noted()
    Path(out).write_text(json.dumps(reports))


def traced(out: str) -> None:
    """What the trace says of each stage, with equal layers counted and without."""
    from msllm.engine.planning import memory, plan, schedule
    from msllm.engine.planning.records import to_json
    from msllm.engine.planning.trace import StageTracer

    tracer = StageTracer("cpu")
    reports: dict[str, Any] = {}
    for name in CASES:
        architecture, layout, run = case(name)
        count = memory.micro_batches(layout, run)
        reports[name] = []
        for stage in range(layout.pp):
            found = tracer.trace(architecture, layout, run, stage, folded=False)
            step: Counter[Any] = Counter()
            for chunk in found.chunks:
                for record in (chunk.forward, chunk.backward):
                    for key, times in record.collectives.items():
                        step[key] += count * times
            step.update(found.reduction.collectives)
            sent = plan.bytes_sent(architecture, layout, run)
            step["send", "pp", sent] = count * plan.hops(layout, stage)
            _, most = schedule.most_held(found.chunks, layout, stage, count)
            report = {
                **found.static, "peak": most + found.static["buffers"], "step": keyed(step),
                "gathering": keyed(found.gathering.collectives),
            }  # fmt: skip
            reports[name].append(report)
    reports["folded"] = [
        [to_json(tracer.trace(*deep(*which), folded=folded)) for folded in (True, False)]
        for which in DEEP
    ]
    Path(out).write_text(json.dumps(reports))


DEEP = (
    ("qwen3", "full", 0), ("gemma2", "none", 1), ("moe", "none", 0), ("moe", "full", 0),
)  # fmt: skip
"""Models of many layers, recompute, and stage: where layers are counted."""


def deep(model: str, recompute: str, stage: int) -> tuple[Any, ...]:
    from dataclasses import replace

    architecture = replace(shape(model), num_layers=14)
    if architecture.sliding_layers is not None:
        layers = {"num_layers": 24, "sliding_layers": tuple(range(0, 24, 2))}
        architecture = replace(architecture, **layers)
    run = RunConfig.model_validate(
        {
            "model": "m", "layout": {"pp": 2, "tp": 2}, "launch": {"npus": 8},
            "data": {"seq_length": 256}, "train": {"micro_batch": 2, "recompute": recompute},
        }
    )  # fmt: skip
    return architecture, Layout.from_world(run.layout, 8), run, stage


if __name__ == "__main__":
    {"real": real, "traced": traced}[sys.argv[1]](sys.argv[2])
