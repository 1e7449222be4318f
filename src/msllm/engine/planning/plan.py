"""A plan: what a run will need and how fast it will be, put together from traces of its stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from msllm.config import RunConfig
from msllm.engine.layout import Layout
from msllm.engine.planning import memory, schedule, timing
from msllm.engine.planning.folding import layer_kinds
from msllm.engine.planning.records import Record, StageTrace
from msllm.models import counts
from msllm.models.architecture import Architecture
from msllm.models.device_models import DeviceModel

Trace = Callable[[int], StageTrace]
"""Traces a stage."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage's device.

    Attributes:
        stage: Which.
        layers: Its transformer layers, chunk by chunk.
        parameters: Number of parameters on the device.
        items: Bytes by item; they add up to the peak.
        flops: Floating-point operations of a step, recomputed ones included.
        seconds: Of one micro-batch's forward and backward pass.
    """

    stage: int
    layers: tuple[range, ...]
    parameters: int
    items: dict[str, int]
    flops: int
    seconds: float

    @property
    def total(self) -> int:
        """Peak memory in bytes."""
        return sum(self.items.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """A run's plan.

    Attributes:
        layout: Parallel sizes.
        run: The run's settings.
        device: What it is planned for.
        stages: Every pipeline stage.
        collectives: Bytes of a step on one device of the slowest stage, by name and group.
        seconds: Of a step, by what they are spent on; they add up to the step's time.
        bubble: Share of the pipeline's time in which the slowest stage waits.
        tokens: Of a step, over all devices.
        mfu: Model FLOPs over the devices' peak.
        imbalance: Tokens of the busiest rank's experts over the mean, as assumed.
    """

    layout: Layout
    run: RunConfig
    device: DeviceModel
    stages: tuple[StagePlan, ...]
    collectives: dict[tuple[str, str], int]
    seconds: dict[str, float]
    bubble: float
    tokens: int
    mfu: float
    imbalance: float

    @property
    def step_seconds(self) -> float:
        """Estimated time of a step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Over all devices."""
        return self.tokens / self.step_seconds

    @property
    def fullest(self) -> StagePlan:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        """Whether the fullest stage fits the device."""
        return self.fullest.total <= self.device.memory


def make_plan(
    architecture: Architecture,
    layout: Layout,
    run: RunConfig,
    device: DeviceModel,
    trace: Trace,
    imbalance: float = 1.0,
    rough: bool = False,
) -> Plan:
    """Trace the stages that differ, and put the plan together.

    Args:
        architecture: The model.
        layout: How it is spread.
        run: Its run.
        device: What it runs on.
        trace: Traces a stage.
        imbalance: What was told to `trace`, to be stated.
        rough: Trace two stages only, the last and the longest other: for comparisons.
    """
    traces = (_two if rough else _all_kinds)(architecture, layout, trace)
    count = memory.micro_batches(layout, run)
    stages = tuple(
        _stage(architecture, layout, run, device, traces[stage], stage)
        for stage in range(layout.pp)
    )
    slowest = max(range(layout.pp), key=lambda stage: stages[stage].seconds)
    send = bytes_sent(architecture, layout, run)
    hop = timing.collective_seconds(
        "send", send, timing.groups(layout)["pp"], device, run.launch.npus
    )
    piped, bubble = schedule.step_seconds(
        [stage.seconds for stage in stages], count, layout.vpp, hop
    )
    tokens = count * run.train.micro_batch * layout.dp * run.data.seq_length
    seconds = _seconds(traces[slowest], layout, run, device, count)
    seconds["bubble"] = piped * bubble
    seconds["pp"] = piped - seconds["bubble"] - count * stages[slowest].seconds
    seconds = {name: took for name, took in seconds.items() if took > 0}
    peak = device.peak(run.dtype) * layout.world_size
    useful = counts.flops_per_token(architecture, run.data.seq_length) * tokens
    return Plan(
        layout, run, device, stages,
        _collectives(traces[slowest], layout, slowest, count, send),
        seconds, bubble, tokens, useful / (peak * sum(seconds.values())), imbalance,
    )  # fmt: skip


def _two(architecture: Architecture, layout: Layout, trace: Trace) -> list[StageTrace]:
    """Trace the last stage, and one with most layers for all others."""
    last = trace(layout.pp - 1)
    if layout.pp == 1:
        return [last]
    stages = layout.stages(architecture.num_layers)[:-1]

    def weight(stage: int) -> tuple[int, int]:
        layers = [layer for chunk in stages[stage] for layer in chunk]
        return sum(map(architecture.has_experts, layers)), len(layers)

    return [trace(max(range(len(stages)), key=weight))] * len(stages) + [last]


def _all_kinds(architecture: Architecture, layout: Layout, trace: Trace) -> list[StageTrace]:
    """Trace one of each kind of stage; equal stages share it."""
    known: dict[Hashable, StageTrace] = {}
    found = []
    for stage, chunks in enumerate(layout.stages(architecture.num_layers)):
        ends = stage == 0, stage == layout.pp - 1
        kind = (ends, *(tuple(layer_kinds(architecture, layers)) for layers in chunks))
        if kind not in known:
            known[kind] = trace(stage)
        found.append(known[kind])
    return found


def _stage(
    architecture: Architecture,
    layout: Layout,
    run: RunConfig,
    device: DeviceModel,
    trace: StageTrace,
    stage: int,
) -> StagePlan:
    count = memory.micro_batches(layout, run)
    kept, most = schedule.most_held(trace.chunks, layout, stage, count)
    items = {
        **trace.static,
        "activations": kept,
        "working memory": most - kept,
        "process": memory.PROCESS[device.kind],
    }
    flops = sum(c.forward.flops + c.backward.flops for c in trace.chunks)
    seconds = sum(
        _pass_seconds(record, layout, run, device)
        for chunk in trace.chunks
        for record in (chunk.forward, chunk.backward)
    )
    layers = layout.stages(architecture.num_layers)[stage]
    return StagePlan(stage, layers, trace.parameters, items, flops * count, seconds)


def _pass_seconds(record: Record, layout: Layout, run: RunConfig, device: DeviceModel) -> float:
    sent = timing.collectives_seconds(record.collectives, layout, device, run.launch.npus)
    return timing.work_seconds(record.work, device, run.dtype) + sum(sent.values())


def _seconds(
    trace: StageTrace, layout: Layout, run: RunConfig, device: DeviceModel, count: int
) -> dict[str, float]:
    """Seconds of a step on the slowest stage, by what they go to."""
    npus = run.launch.npus
    compute: float = 0.0
    groups: defaultdict[str, float] = defaultdict(float)
    for chunk in trace.chunks:
        for record in (chunk.forward, chunk.backward):
            compute += count * timing.work_seconds(record.work, device, run.dtype)
            took = timing.collectives_seconds(record.collectives, layout, device, npus)
            for group, seconds in took.items():
                groups[group] += count * seconds
    last_backward = sum(
        timing.work_seconds(c.backward.work, device, run.dtype) for c in trace.chunks
    )
    once = {
        name: sum(timing.collectives_seconds(record.collectives, layout, device, npus).values())
        for name, record in (("gradients", trace.reduction), ("parameters", trace.gathering))
    }
    if run.train.overlap_grad_reduce:
        once["gradients"] = max(0.0, once["gradients"] - last_backward)
    if run.train.overlap_param_gather:
        once["parameters"] = max(0.0, once["parameters"] - last_backward / 2)
    update = timing.update_seconds(trace.updated, device)
    return {
        "compute": compute,
        **dict(groups),
        "reduce gradients": once["gradients"],
        "update": update,
        "gather parameters": once["parameters"],
    }


def bytes_sent(architecture: Architecture, layout: Layout, run: RunConfig) -> int:
    """Bytes of what a stage sends the next one for a micro-batch."""
    if layout.pp == 1:
        return 0
    parts = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    tokens = run.train.micro_batch * run.data.seq_length // parts
    return tokens * architecture.hidden_size * memory.BYTES[run.dtype]


def _collectives(
    trace: StageTrace, layout: Layout, stage: int, count: int, send: int
) -> dict[tuple[str, str], int]:
    """Bytes of a step's collectives on the device."""
    found: Counter[tuple[str, str]] = Counter()
    for chunk in trace.chunks:
        for record in (chunk.forward, chunk.backward):
            for key, size in record.bytes_by_group().items():
                found[key] += count * size
    for record in (trace.reduction, trace.gathering):
        found.update(record.bytes_by_group())
    found["send", "pp"] = count * send * hops(layout, stage)
    sizes = timing.groups(layout)
    return {key: size for key, size in found.items() if size and sizes[key[1]].size > 1}


def hops(layout: Layout, stage: int) -> int:
    """How often a stage sends something for a micro-batch: on from each chunk, and back."""
    last = layout.num_chunks - 1
    return sum((c < last) + (c > 0) for c in range(stage, layout.num_chunks, layout.pp))


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs: bytes, seconds, FLOPs."""
    sizes = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
    return {
        "layout": {name: getattr(plan.layout, name) for name in sizes},
        "recompute": plan.run.train.recompute,
        "device": plan.device.name,
        "device_memory_bytes": plan.device.memory,
        "fits": plan.fits,
        "stages": [_stage_json(stage) for stage in plan.stages],
        "collectives": [
            {"name": name, "group": group, "bytes": size}
            for (name, group), size in sorted(plan.collectives.items())
        ],
        "bubble": plan.bubble,
        "seconds": plan.seconds,
        "step_time_s": plan.step_seconds,
        "tokens": plan.tokens,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "imbalance": plan.imbalance,
    }


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "layers": [[layers.start, layers.stop] for layers in stage.layers],
        "parameters": stage.parameters,
        "memory_bytes": {**stage.items, "total": stage.total},
        "flops": stage.flops,
    }


def layers_text(chunks: Sequence[range]) -> str:
    """Layers of a stage's chunks: `0-3, 16-19`."""
    names = (f"{c.start}-{c.stop - 1}" if len(c) > 1 else str(c.start) for c in chunks if c)
    return ", ".join(names) or "none"
