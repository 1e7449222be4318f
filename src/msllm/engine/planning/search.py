"""Layouts worth a trace: all legal ones, judged by formulas, so that hundreds take seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msllm.config import LayoutConfig, RunConfig
from msllm.engine.layout import Layout, divides
from msllm.engine.planning import memory, timing
from msllm.engine.planning.sizes import divisors
from msllm.engine.preflight import sizes_problems
from msllm.models import counts
from msllm.models.architecture import Architecture
from msllm.models.device_models import DeviceModel

SIZES = ("tp", "pp", "vpp", "ep", "etp", "cp")
LARGEST_WORLD = 1 << 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal layout.

    Attributes:
        run: The run with its sizes and recompute.
        layout: The sizes.
        total: Bytes of the fullest device, by formulas.
        seconds: Of a step by formulas, and by what they go to.
    """

    run: RunConfig
    layout: Layout
    total: int
    seconds: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """By formulas."""
        samples = memory.micro_batches(self.layout, self.run) * self.run.train.micro_batch
        tokens = samples * self.layout.dp * self.run.data.seq_length
        return tokens / sum(self.seconds.values())

    @property
    def name(self) -> str:
        """The sizes that are not 1, and the recompute: `tp 4 pp 8 ep 32, full recompute`."""
        sizes = [f"{n} {getattr(self.layout, n)}" for n in SIZES if getattr(self.layout, n) > 1]
        recompute = self.run.train.recompute
        words = f"{recompute} recompute" if recompute != "none" else "no recompute"
        return f"{' '.join(sizes) or 'dp only'}, {words}"


def with_sizes(run: RunConfig, recompute: str | None = None, **sizes: int) -> RunConfig:
    """Change a run's parallel sizes, all those not given being 1, and its recompute."""
    kept = {
        "sequence_parallel": run.layout.sequence_parallel,
        "distributed_optimizer": run.layout.distributed_optimizer,
    }
    train = run.train
    if recompute is not None and recompute != train.recompute:
        train = train.model_copy(update={"recompute": recompute, "recompute_layers": 1})
    return run.model_copy(update={"layout": LayoutConfig(**{**kept, **sizes}), "train": train})


def candidate(run: RunConfig, architecture: Architecture, device: DeviceModel) -> Candidate | str:
    """Judge a run by formulas; or say why it is not legal."""
    problems = list(sizes_problems(run, architecture, device.kind))
    if problems:
        return problems[0].problem
    layout = Layout.from_world(run.layout, run.launch.world_size)
    estimate = memory.estimate(architecture, layout, run, device.kind)
    seconds = _seconds(architecture, layout, run, device, estimate)
    return Candidate(run, layout, estimate.total, seconds)


def candidates(
    run: RunConfig, architecture: Architecture, device: DeviceModel, recomputes: tuple[str, ...]
) -> Iterator[Candidate]:
    """Judge all legal layouts of a run's devices.

    Tensor parallelism stays inside a machine; virtual stages are tried by two.
    """
    world, npus = run.launch.world_size, run.launch.npus
    experts = architecture.moe.num_experts if architecture.moe else 1
    for tp in divisors(npus, npus):
        for pp in divisors(world // tp, architecture.num_layers):
            for ep in divisors(world // pp, experts):
                for vpp in (1, 2) if pp > 1 else (1,):
                    for recompute in recomputes:
                        tried = with_sizes(run, recompute, tp=tp, pp=pp, ep=ep, vpp=vpp)
                        found = _legal(tried, architecture, device)
                        if found is not None:
                            yield found


def _legal(run: RunConfig, architecture: Architecture, device: DeviceModel) -> Candidate | None:
    layout = Layout.from_world(run.layout, run.launch.world_size)
    if divides(run.layout, run.launch.world_size) or layout.problems(architecture):
        return None
    found = candidate(run, architecture, device)
    return None if isinstance(found, str) else found


def neighbours(run: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Runs one change away, with the change's name."""
    sizes = {name: getattr(run.layout, name) for name in SIZES}
    for name in ("tp", "pp", "ep", "vpp"):
        for changed in (sizes[name] // 2, sizes[name] * 2):
            if changed:
                other = {**sizes, name: changed}
                yield f"{name} {changed}", with_sizes(run, run.train.recompute, **other)
    other_recompute = "none" if run.train.recompute == "full" else "full"
    yield f"recompute {other_recompute}", with_sizes(run, other_recompute, **sizes)


def devices_needed(run: RunConfig, architecture: Architecture, device: DeviceModel) -> int | None:
    """The smallest number of machines' devices, doubled each time, on which a run fits."""
    nodes = run.launch.nodes
    while (nodes := 2 * nodes) * run.launch.npus <= LARGEST_WORLD:
        launch = run.launch.model_copy(update={"nodes": nodes})
        train = run.train.model_copy(update={"global_batch": None})
        larger = run.model_copy(update={"launch": launch, "train": train})
        found = candidates(larger, architecture, device, ("full",))
        if any(each.total <= device.memory for each in found):
            return nodes * run.launch.npus
    return None


def _seconds(
    architecture: Architecture,
    layout: Layout,
    run: RunConfig,
    device: DeviceModel,
    estimate: memory.Estimate,
) -> dict[str, float]:
    """Seconds of a step by formulas: what `plan` traces, with the counts of a usual layer."""
    count = memory.micro_batches(layout, run)
    again = run.train.recompute == "full"
    tokens = run.train.micro_batch * run.data.seq_length
    flops = counts.flops_per_token(architecture, run.data.seq_length) * tokens
    share = flops * _longest_stage(architecture, layout, run) / (layout.tp * layout.cp)
    speed = device.peak(run.dtype) * device.efficiency.matmul
    one = share * (4 / 3 if again else 1) / speed
    groups, npus = timing.groups(layout), run.launch.npus
    border = tokens // layout.cp * architecture.hidden_size * memory.BYTES[run.dtype]
    layers = -(-architecture.num_layers // layout.pp)

    def took(name: str, size: int, group: str) -> float:
        return timing.collective_seconds(name, size, groups[group], device, npus)

    tp = layers * (14 if again else 10) * took("all-gather", border, "tp")
    ep = 0.0
    if (moe := architecture.moe) is not None:
        rows = border // (layout.tp if layout.sequence_parallel else 1) * moe.num_experts_per_tok
        with_experts = sum(map(architecture.has_experts, range(architecture.num_layers)))
        ep = (6 if again else 4) * with_experts / layout.pp * took("all-to-all", rows, "ep")
    numbers = estimate.parameters
    once = sum(
        took("reduce-scatter", 4 * numbers[part], group)
        + took("all-gather", memory.BYTES[run.dtype] * numbers[part], group)
        for part, group in (("dense", "dp"), ("experts", "expert dp"))
    )
    busy = one + tp + ep
    return {
        "compute": count * one,
        "tp": count * tp,
        "ep": count * ep,
        "bubble": busy * (layout.pp - 1) / layout.vpp,
        "dp": once,
    }


def _longest_stage(architecture: Architecture, layout: Layout, run: RunConfig) -> float:
    """Share of the model's FLOPs on the stage that has most; the head is on the last one."""
    whole = counts.flops_per_token(architecture, run.data.seq_length)
    head = 6.0 * architecture.hidden_size * architecture.vocab_size / whole
    layer = (1 - head) / architecture.num_layers
    held = [sum(map(len, chunks)) for chunks in layout.stages(architecture.num_layers)]
    further = head + layer  # of each layer of multi-token prediction
    last = held[-1] * layer + head + further * architecture.num_nextn_predict_layers
    return max([last, *(count * layer for count in held[:-1])])
