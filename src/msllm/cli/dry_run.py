"""What `--dry-run` prints: every setting with its source, the layout, the memory, the commands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from msllm.cli.render import size
from msllm.cli.setting_names import PATHS
from msllm.cli.settings import Resolved
from msllm.config import RunConfig
from msllm.engine import preflight
from msllm.engine.layout import Layout
from msllm.engine.planning import memory
from msllm.errors import Problem
from msllm.models.architecture import Architecture


def report(resolved: Resolved, architecture: Architecture, missing: Sequence[Problem] = ()) -> str:
    """Everything that is known of a run before it runs; `missing` is what this machine lacks."""
    config = resolved.config
    kind = preflight.device_kind(config.device)
    layout = Layout.from_world(config.layout, config.launch.world_size)
    parts = [
        ("settings", _settings(resolved)),
        ("layout", _layout(layout, architecture, config)),
        (f"memory of a device ({kind}), estimated", _memory(config, architecture, layout, kind)),
        ("commands", _commands(config)),
    ]
    if missing:
        parts.append(("this machine can't run it", (str(problem) for problem in missing)))
    return "\n\n".join(
        f"{title}\n" + "\n".join(f"  {row}" for row in rows) for title, rows in parts
    )


def _settings(resolved: Resolved) -> Iterator[str]:
    values = {path: _text(_value(resolved.config, path)) for path in PATHS}
    names, texts = max(map(len, values)), min(40, max(map(len, values.values())))
    for path, text in values.items():
        yield f"{path:<{names}}  {text:<{texts}}  {resolved.sources[path]}"


def _value(config: RunConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _layout(layout: Layout, architecture: Architecture, config: RunConfig) -> Iterator[str]:
    sizes = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
    named = "  ".join(f"{name} {getattr(layout, name)}" for name in sizes)
    yield f"{layout.world_size} processes: {named}"
    count = memory.micro_batches(layout, config)
    samples = count * config.train.micro_batch * layout.dp
    yield (
        f"a step: {samples} samples = {samples * config.data.seq_length:,} tokens, in {count} "
        f"micro-batches on each of {layout.dp} data parallel ranks"
    )
    for stage, chunks in enumerate(layout.stages(architecture.num_layers)):
        yield f"stage {stage}: " + ", ".join(map(_range, chunks)) + _ends(layout, stage)


def _range(layers: range) -> str:
    if not layers:
        return "no layers"
    return f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"


def _ends(layout: Layout, stage: int) -> str:
    ends = ["embedding"] if stage == 0 else []
    ends += ["head"] if stage == layout.pp - 1 else []
    return f" + {' + '.join(ends)}" if ends else ""


def _memory(
    config: RunConfig, architecture: Architecture, layout: Layout, kind: str
) -> Iterator[str]:
    planned = memory.estimate(architecture, layout, config, kind)
    for name, number in planned.items.items():
        yield f"{name:<16} {size(number):>12}"
    where = f" (stage {planned.stage}, the fullest)" if layout.pp > 1 else ""
    yield f"{'total':<16} {size(planned.total):>12}{where}"
    if kind != "cpu":
        yield f"by formulas; traced, with traffic and speed: {_plan_command(layout)}"


def _plan_command(layout: Layout) -> str:
    """The command that plans this very layout: without any size, it would search for one."""
    words = ["msllm", *("plan" if word == "pretrain" else word for word in sys.argv[1:])]
    words = [word for word in words if word != "--dry-run"]
    sizes = {f"--{name}": getattr(layout, name) for name in ("tp", "pp", "vpp", "ep", "etp")}
    for flag, size_ in sizes.items():
        given = any(word == flag or word.startswith(f"{flag}=") for word in words)
        if not given and (size_ > 1 or flag == "--tp"):
            words += [flag, str(size_)]
    return shlex.join(words)


def _commands(config: RunConfig) -> Iterator[str]:
    """Name the command of each machine."""
    words = ["msllm", *(word for word in sys.argv[1:] if word != "--dry-run")]
    nodes = config.launch.nodes
    if nodes == 1:
        yield shlex.join(words)
        return
    words = _without(words, "--node-rank")
    for rank in range(min(nodes, 4)):
        extra = ["--node-rank", str(rank)]
        if config.launch.rdzv_endpoint is None:
            extra += ["--rdzv-endpoint", "HOST:PORT"]
        yield f"machine {rank}: {shlex.join([*words, *extra])}"
    if nodes > 4:
        yield f"... to machine {nodes - 1}; under Slurm or Kubernetes the ranks are read from there"


def _without(words: list[str], option: str) -> list[str]:
    """Take an option and its value out of a command line."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == option:
            next(rest, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept
