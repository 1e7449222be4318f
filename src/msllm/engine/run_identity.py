"""Whether a folder's run is the one that is asked for: then it goes on, else it is refused.

What changes the curve must be the same. How the work is spread, shown, saved or sped up may differ,
and a run may get more steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from msllm.config import DataConfig, RunConfig, read_run
from msllm.engine.output_path import check_parent
from msllm.engine.training.run_folder import RunFolder
from msllm.errors import InputError, Problem, first_line
from msllm.models.resolve import resolve_model

FREE_SECTIONS = {"launch", "log"}
FREE = {
    "checkpoint.save_interval", "checkpoint.keep", "checkpoint.async_save", "checkpoint.resume",
    "checkpoint.export_hf",
    "layout.tp", "layout.pp", "layout.vpp", "layout.cp", "layout.ep", "layout.etp",
    "layout.pp_layout", "layout.sequence_parallel", "out", "device", "deterministic",
    "data.cache_dir", "data.workers", "data.loader_workers", "data.text_key", "train.steps",
    "train.micro_batch", "train.recompute", "train.recompute_modules", "train.recompute_layers",
    "train.overlap_grad_reduce", "train.overlap_param_gather", "train.eval_interval",
    "train.eval_batches", "moe.dispatcher", "moe.grouped_gemm",
}  # fmt: skip
"""Settings that a resumed run may change."""
SHOWN = 4


def check_folder(config: RunConfig) -> list[Problem]:
    """Refuse a folder that holds something else than this very run."""
    if config.out is None:
        return []
    path, where = config.out.expanduser(), f"--out {config.out}"
    if not path.exists():
        return check_parent(path, where)
    if not path.is_dir():
        return [Problem(f"{path} is a file", where, "name a folder")]
    if not any(path.iterdir()):
        return []
    folder = RunFolder(path)
    if not folder.holds_run():
        return [Problem(f"{path} holds something that is no run", where, "name another folder")]
    if config.checkpoint.resume == "never":
        return [
            Problem(f"{path} holds a run already", where, "name another folder, or --resume auto")
        ]
    if not folder.config.exists():
        return [Problem(f"the run in {path} has no run.yaml", where, "name another folder")]
    try:
        earlier = read_run(folder.config)
    except (OSError, ValidationError, yaml.YAMLError) as error:
        said = f"cannot read it: {first_line(error)}"
        return [Problem(said, str(folder.config), "name another folder")]
    if problems := folder.check_live(where):
        return problems
    config, problems = _with_final_sources(config, earlier.data, where)
    return problems + compare(earlier, config, where)


def kept(config: RunConfig) -> dict[str, Any]:
    """Give the settings that a run keeps when it goes on, and its steps; empty if none goes on.

    What is wrong with the folder is left to `check_folder`.
    """
    if config.out is None or config.checkpoint.resume == "never":
        return {}
    file = RunFolder(config.out.expanduser()).config
    try:
        earlier = read_run(file) if file.exists() else None
    except (OSError, ValidationError, yaml.YAMLError):
        return {}
    if earlier is None or _model(earlier.model) != _model(config.model):
        return {}
    settings = dict(_identity(earlier)) | {"train.steps": earlier.train.steps}
    return {path: value for path, value in settings.items() if path != "model"}


def compare(earlier: RunConfig, config: RunConfig, where: str) -> list[Problem]:
    """List the first settings that make it another run; sources are named as in run.yaml."""
    found = [
        f"{path} was {old!r} and now is {new!r}" for path, old, new in _differences(earlier, config)
    ]
    if not found:
        return []
    shown = "; ".join(found[:SHOWN])
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return [
        Problem(
            f"the folder holds another run: {shown}{more}",
            where,
            "name another folder for a new run, or give the earlier settings to go on with that",
        )
    ]


def _with_final_sources(
    config: RunConfig, earlier: DataConfig, where: str
) -> tuple[RunConfig, list[Problem]]:
    """Name the sources as a run's file does, text by its tokens; and refuse text that has changed.

    What is wrong with the sources themselves is left to `check_sources`.
    """
    from msllm.engine.data.cache import locate_data
    from msllm.engine.data.sources import parse_sources

    final: dict[str, list[str]] = {}
    problems: list[Problem] = []
    try:
        located = locate_data(config.data)
    except (InputError, OSError):
        located = earlier
    for name in ("paths", "valid_paths"):
        old, new = getattr(earlier, name), getattr(located, name)
        sources, _ = parse_sources(getattr(config.data, name), where)
        changed = [
            Problem(
                f"`{source.text}` is not what the run was started with: its text, the tokenizer or "
                "data.text_key has changed",
                where,
                "restore it, or name another folder for a new run",
            )
            for source, before, now in zip(sources, old, new, strict=False)
            if source.kind == "raw" and Path(before).parent.name != Path(now).parent.name
        ]
        problems += changed
        final[name] = old if changed else new
    data = config.data.model_copy(update=final)
    return config.model_copy(update={"data": data}), problems


def _differences(earlier: RunConfig, config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    old, new = dict(_identity(earlier)), dict(_identity(config))
    for path, value in new.items():
        if old[path] != value:
            yield path, old[path], value


def _identity(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Give the settings that make the run what it is."""
    for name, value in config.model_dump(mode="json").items():
        if name in FREE_SECTIONS:
            continue
        if not isinstance(value, dict):
            if name not in FREE:
                yield name, _normal(name, value, config)
            continue
        for inner, inner_value in value.items():
            if f"{name}.{inner}" not in FREE:
                yield f"{name}.{inner}", _normal(f"{name}.{inner}", inner_value, config)


def _normal(path: str, value: Any, config: RunConfig) -> Any:
    if path == "train.global_batch" and value is None:
        model = config.layout.tp * config.layout.pp * config.layout.cp
        return config.train.micro_batch * (config.launch.world_size // model)
    if path == "model":
        return _model(value)
    if path in ("data.tokenizer", "checkpoint.init_from") and value is not None:
        return str(Path(value).expanduser().resolve())
    return value


def _model(name: str) -> str:
    """A model's one name, whichever of its names or which path was given."""
    with contextlib.suppress(InputError):
        found = resolve_model(name)
        return found.name if found.card else str(Path(name).expanduser().resolve())
    return name
