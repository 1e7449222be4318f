"""Everything that can be known to go wrong before a run starts, found all at once.

Nothing is written and no process started here. Single values were checked when the RunConfig was
made; here it is whether they fit each other, the model, the data, the folder and the machine.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import cast

from msllm.config import RunConfig
from msllm.engine import device as devices
from msllm.engine import host_memory
from msllm.engine.idle_settings import idle_settings
from msllm.engine.layout import Layout, divides
from msllm.engine.placement import placement
from msllm.engine.planning import memory
from msllm.engine.run_identity import check_folder
from msllm.engine.training import resume
from msllm.errors import MsllmError, Problem
from msllm.models.architecture import Architecture
from msllm.models.families import families
from msllm.models.hf_config import architecture_from_config, read_config
from msllm.models.resolve import resolve_model
from msllm.models.support import untrained_features


def check(config: RunConfig, environ: Mapping[str, str] | None = None) -> list[Problem]:
    """List everything that keeps a run from working here; empty if it may start."""
    problems = [*check_run(config), *check_device(config), *check_placement(config, environ)]
    return problems or check_room(config)


def check_run(config: RunConfig) -> list[Problem]:
    """List what would be wrong on any machine: sizes, schedule, data, folder."""
    architecture, problems = check_shape(config, device_kind(config.device))
    problems += _schedule(config)
    problems += _optimizer(config)
    data, folder = _data(config, architecture), check_folder(config)
    problems += data + folder
    problems += _beginning(config, architecture, comparable=not data and not folder)
    problems += _export(config, architecture)
    problems += _sinks(config)
    if config.launch.nodes > 1 and config.out is None:
        hint = "give --out DIR on each"
        problems.append(Problem("several machines need one folder for the run", "--nodes", hint))
    return problems


def check_shape(config: RunConfig, kind: str) -> tuple[Architecture | None, list[Problem]]:
    """Find the model, and list what is wrong with it and with how it is spread."""
    problems: list[Problem] = []
    architecture: Architecture | None = None
    try:
        architecture = resolve_model(config.model).architecture
    except MsllmError as error:
        problems += [Problem(p.problem, p.where or "--model", p.hint) for p in error.problems]
    if architecture is not None:
        problems += check_model(config, architecture)
        problems += sizes_problems(config, architecture, kind)
        problems += _recompute(config, architecture)
    return architecture, problems


def warnings(config: RunConfig, architecture: Architecture) -> list[str]:
    """List what works but may not be meant."""
    found = list(idle_settings(config, architecture))
    longest = architecture.max_position_embeddings
    if longest is not None and config.data.seq_length > longest:
        found.append(
            f"sequences of {config.data.seq_length:,} tokens are longer than the "
            f"{longest:,} positions that the model was made for"
        )
    return found + _odd_weights(config, architecture)


def _odd_weights(config: RunConfig, architecture: Architecture) -> list[str]:
    """List what of the weights that a run begins with, or of their config, is not taken over."""
    folder = config.checkpoint.init_from
    if folder is None or resume.checkpoint_of(config) is not None:
        return []
    from msllm.engine.weights import matching, sidecar, start
    from msllm.engine.weights.source import open_weights

    checkpoint = start.locate(folder, f"--init-from {folder}")
    found = []
    if checkpoint is None:
        found = matching.warnings(open_weights(folder), architecture)
    beside = folder.expanduser() if checkpoint is None else sidecar.kept(checkpoint)
    if beside is None or not (beside / sidecar.CONFIG).is_file():
        return found
    theirs = asdict(architecture_from_config(read_config(beside)))
    other = list(resume.differences(theirs, asdict(architecture)))
    if other:
        shown = "; ".join(other[: resume.SHOWN])
        found.append(
            f"the model that is trained is not quite that of {folder}: {shown}; --model {folder} "
            "trains that"
        )
    return found


def device_kind(name: str) -> devices.Kind:
    """Say what kind of device `--device NAME` means here, without complaint if it is missing."""
    if name == "auto":
        return devices.select_device("auto").kind
    return cast(devices.Kind, name)


def check_model(config: RunConfig, architecture: Architecture) -> Iterator[Problem]:
    """Refuse a model or backend that msllm can't train yet."""
    if config.backend == "fsdp2":
        yield Problem(
            "the FSDP2 backend is not part of this version", "--backend fsdp2", "use mcore"
        )
        return
    missing = untrained_features(architecture)
    family = families().get(architecture.model_type)
    if not missing and (family is None or not family.trains):
        missing = [f"models of type {architecture.model_type}"]
    if missing:
        yield Problem(
            f"{config.model} is listed, but msllm can't train it yet: missing are "
            f"{', '.join(missing)}",
            f"--model {config.model}",
            "`msllm list-models` shows in its column `support` what trains",
        )


def check_device(config: RunConfig) -> list[Problem]:
    """List what this machine's devices lack for the run."""
    kind = device_kind(config.device)
    problem = devices.probe(kind)
    if problem is not None:
        return [problem]
    device = devices.Device(kind)
    if config.dtype == "bf16" and not device.supports("bf16"):
        return [Problem(f"{device.name} can't compute in bf16", "--dtype bf16", "use --dtype fp32")]
    count = devices.device_count(kind)
    if kind != "cpu" and config.launch.npus > count:
        return [
            Problem(
                f"{config.launch.npus} processes on this machine, but only {count} {kind} devices",
                f"--npus {config.launch.npus}",
                f"use --npus {count}, or more machines with --nodes",
            )
        ]
    return []


def check_placement(config: RunConfig, environ: Mapping[str, str] | None = None) -> list[Problem]:
    """List what is not known of this machine's place among several."""
    try:
        placement(os.environ if environ is None else environ, config.launch)
    except MsllmError as error:
        return error.problems
    return []


def sizes_problems(config: RunConfig, architecture: Architecture, kind: str) -> Iterator[Problem]:
    """Check the parallel sizes, and the batches over them."""
    world = config.launch.world_size
    unfit = divides(config.layout, world)
    yield from unfit
    layout = Layout.from_world(config.layout, world)
    yield from layout.problems(architecture)
    if layout.cp > 1:
        yield Problem(
            "context parallelism is not part of this version", f"--cp {layout.cp}", "use --cp 1"
        )
    if layout.etp > 1 and kind == "cpu":
        yield Problem(
            "expert tensor parallelism does not run on the CPU: its gloo gathers equal sizes only",
            f"--etp {layout.etp}",
            "use --etp 1",
        )
    if layout.sequence_parallel and config.data.seq_length % layout.tp:
        yield Problem(
            f"sequences of {config.data.seq_length} tokens can't be cut into {layout.tp} parts",
            f"--seq-length {config.data.seq_length}",
            f"use a multiple of {layout.tp}",
        )
    if not unfit:
        yield from _batches(config, layout)


def _batches(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    micro, samples = config.train.micro_batch, config.train.global_batch
    one = micro * layout.dp
    if samples is None:
        samples = one
    elif samples < layout.dp:
        yield Problem(
            f"a global batch of {samples} is smaller than the {layout.dp} data parallel ranks",
            f"--global-batch {samples}",
            f"use a multiple of {one}, or more model parallelism",
        )
        return
    elif samples % one:
        yield Problem(
            f"a global batch of {samples} is no multiple of micro batch x data parallel size = "
            f"{micro} x {layout.dp} = {one}",
            f"--global-batch {samples} --micro-batch {micro}",
            f"use {_around(samples, one)}",
        )
        return
    count = samples // one
    if layout.vpp > 1 and count % layout.pp:
        yield Problem(
            f"an interleaved pipeline of {layout.pp} stages needs a multiple of {layout.pp} "
            f"micro-batches, not {count}",
            f"--vpp {layout.vpp} --global-batch {samples}",
            f"use --global-batch {_around(samples, one * layout.pp)}",
        )


def _around(number: int, step: int) -> str:
    below, above = number // step * step, -(-number // step) * step
    return f"{below} or {above}" if below else str(above)


def _schedule(config: RunConfig) -> Iterator[Problem]:
    train = config.train
    total = train.decay_steps or train.steps
    if train.min_lr > train.lr:
        yield Problem(
            f"the learning rate would end at {train.min_lr:g}, above its peak {train.lr:g}",
            "train.min_lr",
            "set train.min_lr below train.lr",
        )
    if train.warmup_steps >= total:
        yield Problem(
            f"{train.warmup_steps} steps of warm-up leave nothing of the schedule's {total} steps",
            "train.warmup_steps",
            f"use fewer than {total}",
        )
    decay = train.wsd_decay_steps
    if train.lr_schedule == "wsd" and decay is not None and decay + train.warmup_steps > total:
        yield Problem(
            f"{train.warmup_steps} steps of warm-up and {decay} of decay are more than the "
            f"schedule's {total} steps",
            "train.wsd_decay_steps",
            f"use at most {max(total - train.warmup_steps, 1)}",
        )


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    train = config.train
    if train.optimizer == "muon" and importlib.util.find_spec("emerging_optimizers") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        hint = "pip install 'msllm[muon]', or --optimizer adamw"
        if sys.version_info < (3, 12):
            hint = f"that package needs Python 3.12 and this is {version}: use --optimizer adamw"
        yield Problem(
            "Muon needs the package emerging-optimizers, which is not installed",
            "--optimizer muon",
            hint,
        )
    if train.overlap_param_gather and not (
        config.layout.distributed_optimizer and train.overlap_grad_reduce
    ):
        yield Problem(
            "gathering parameters during the forward pass needs the distributed optimizer and "
            "overlapped gradient reduction",
            "train.overlap_param_gather",
            "set layout.distributed_optimizer and train.overlap_grad_reduce as well",
        )


def _recompute(config: RunConfig, architecture: Architecture) -> Iterator[Problem]:
    train = config.train
    modules = set(train.recompute_modules)
    if train.recompute == "selective" and not modules:
        yield Problem(
            "selective recompute of nothing",
            "train.recompute_modules",
            "name some, or --recompute none",
        )
    if train.recompute == "selective" and "moe_act" in modules:
        where = "train.recompute_modules"
        if not architecture.is_moe:
            yield Problem("moe_act needs a model with experts", where, "leave out moe_act")
        if train.optimizer == "muon":
            yield Problem(
                "recomputing moe_act needs the grouped matmul, and muon takes experts one by one",
                where,
                "leave out moe_act, or use --optimizer adamw",
            )
        elif architecture.is_moe and not config.moe.grouped_gemm:
            yield Problem(
                "recomputing moe_act needs the grouped matmul", "moe.grouped_gemm", "set it to true"
            )
    if train.recompute == "full":
        yield from _blocks(config, architecture)


def _blocks(config: RunConfig, architecture: Architecture) -> Iterator[Problem]:
    """Check that recomputed blocks make up each pipeline chunk, as Megatron wants them to."""
    layout = Layout.from_world(config.layout, config.launch.world_size)
    block = config.train.recompute_layers
    lengths = {len(chunk) for chunk in layout.chunks(architecture.num_layers)}
    if architecture.num_nextn_predict_layers:
        lengths.add(1)  # Megatron takes the layers of multi-token prediction one by one
    counts = sorted(lengths)
    if all(count % block == 0 for count in counts):
        return
    common = math.gcd(*counts)
    legal = [d for d in range(1, common + 1) if common % d == 0]
    yield Problem(
        f"blocks of {block} layers don't make up pipeline chunks of "
        f"{' and '.join(map(str, counts))} layers",
        "train.recompute_layers",
        f"use {', '.join(map(str, legal))}",
    )


def _data(config: RunConfig, architecture: Architecture | None) -> list[Problem]:
    from msllm.engine.data.sources import check_sources

    unknown = sys.maxsize
    return check_sources(config.data, architecture.vocab_size if architecture else unknown)


def _beginning(
    config: RunConfig, architecture: Architecture | None, comparable: bool
) -> list[Problem]:
    """Check what the run begins with: a checkpoint, if its run can be compared, or weights."""
    try:
        checkpoint = resume.checkpoint_of(config)
    except MsllmError as error:
        return error.problems
    if architecture is None:
        return []
    if checkpoint is not None:
        found = resume.check_steps(config, checkpoint)
        return found + (resume.check_inputs(config, checkpoint) if comparable else [])
    if config.checkpoint.init_from is None:
        return []
    from msllm.engine.weights.start import check

    return check(
        config.checkpoint.init_from, architecture, f"--init-from {config.checkpoint.init_from}"
    )


def _export(config: RunConfig, architecture: Architecture | None) -> Iterator[Problem]:
    """Refuse exports of weights whose published names are not known."""
    if architecture is None or config.checkpoint.export_hf == "never":
        return
    from msllm.engine.weights import matching

    if matching.mapped(architecture) is None:
        where = f"--export-hf {config.checkpoint.export_hf}"
        yield matching.unknown(architecture, where)


def _sinks(config: RunConfig) -> list[Problem]:
    from msllm.engine.training.sinks import sink_problems

    return sink_problems(config.log)


def check_room(config: RunConfig) -> list[Problem]:
    """Refuse what needs more memory than is free, unless it is forced. For a run that is right."""
    if config.launch.force:
        return []
    architecture = resolve_model(config.model).architecture
    assert architecture is not None
    return list(check_memory(config, architecture, device_kind(config.device)))


def check_memory(config: RunConfig, architecture: Architecture, kind: str) -> Iterator[Problem]:
    """Compare the estimate with the memory that is free."""
    layout = Layout.from_world(config.layout, config.launch.world_size)
    planned = memory.estimate(architecture, layout, config, kind)
    if kind == "cpu":
        need, free = planned.total * config.launch.npus, host_memory.available()
        what = f"{config.launch.npus} processes of {_gib(planned.total)} = {_gib(need)}"
    else:
        need = planned.total
        free = devices.Device(cast(devices.Kind, kind), 0).free_memory()
        what = f"{_gib(need)} a device"
    if need <= free:
        return
    items = ", ".join(
        f"{n} {_gib(size)}" for n, size in planned.items.items() if size >= planned.total // 100
    )
    ways = "; ".join(memory.three_ways_down(config, architecture, layout, kind))
    yield Problem(
        f"needs about {what}, and {_gib(free)} are free ({items})",
        f"--npus {config.launch.npus}",
        f"{ways}; or --force",
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
