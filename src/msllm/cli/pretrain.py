"""`msllm pretrain`: settings put together, everything checked, then the workers started."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from msllm.cli.flags import RUN, ConfigFile, settings_of, with_flags
from msllm.errors import InputError

if TYPE_CHECKING:
    from msllm.config import DataConfig, RunConfig, Section
    from msllm.engine.training.run_folder import RunFolder
    from msllm.models.resolve import Model

    AnySection = TypeVar("AnySection", bound=Section)

EPILOG = """Examples:

  msllm pretrain --model tiny-qwen3 --data mock --device cpu --steps 20

  msllm pretrain --model qwen3-8b --data 0.7:code 0.3:text --tokenizer tok --nodes 1 --npus 8

  msllm pretrain --model qwen3-8b --data corpus/ --tokenizer tok --set train.lr=2e-5 --dry-run

  msllm pretrain --config runs/qwen3-8b-1/run.yaml --out runs/again
"""

WORKER = "msllm.engine.training.worker"


@with_flags
def pretrain(
    *,
    config: ConfigFile = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE...",
            help="any setting by name, such as train.lr=1e-4; --dry-run lists all",
            rich_help_panel=RUN,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="check all, print each value with its source, layout and memory; start nothing",
            rich_help_panel=RUN,
        ),
    ] = False,
    **flags: Any,
) -> None:
    """Train a model on text."""
    from msllm.cli import recipe, settings
    from msllm.engine import preflight
    from msllm.engine.training import resume
    from msllm.models.resolve import resolve_model

    resolved = settings.resolve(
        settings_of(flags), assignments or [], config, recipe.fill(preflight.device_kind)
    )
    if dry_run:
        _show(resolved)
        return
    problems = [*resolved.problems, *preflight.check(resolved.config)]
    if problems:
        raise InputError(problems)
    if (step := resume.finished_at(resolved.config)) is not None:
        print(f"already at step {step}, nothing to do", file=sys.stderr)
        return
    model = resolve_model(resolved.config.model)
    for warning in preflight.warnings(resolved.config, model.architecture):
        print(f"warning: {warning}", file=sys.stderr)
    train(_settled(resolved.config, model))


def train(config: RunConfig) -> None:
    """Prepare the data and the folder of a run that was checked, and run it to the end.

    Raises:
        RunError: A worker failed.
        Interrupted: The run was stopped; what it has learnt is saved.
    """
    from msllm.config import write_run
    from msllm.engine import preflight
    from msllm.engine.device import Device
    from msllm.engine.launch import launch
    from msllm.engine.training.console import Console
    from msllm.engine.training.run_folder import RunFolder

    out = config.out
    assert out is not None
    config = config.model_copy(update={"data": _prepare(config)})
    folder = RunFolder(out).create()
    environment = Device(preflight.device_kind(config.device)).environment()
    with _only_run(config, folder):
        write_run(config, folder.config)
        print(f"run folder: {folder.path}", file=sys.stderr)
        launch(
            WORKER,
            [str(folder.path)],
            config.launch,
            folder.logs,
            Console(folder.path, config),
            {name: value for name, (value, _) in environment.items()},
        )
    print(f"done: {folder.path}", file=sys.stderr)


def _only_run(config: RunConfig, folder: RunFolder) -> AbstractContextManager[None]:
    """Keep a second run out of the folder; of a job's machines the first one does so."""
    from msllm.engine.placement import placement

    first = placement(os.environ, config.launch).node_rank == 0
    return folder.live() if first else nullcontext()


def _show(resolved: Any) -> None:
    """Print what would happen; what is wrong comes last, as the error that it is.

    A plan may be for another machine: what this one lacks is said, but is no error.
    """
    from msllm.cli.dry_run import report
    from msllm.engine import preflight
    from msllm.models.resolve import resolve_model

    config = resolved.config
    problems = [*resolved.problems, *preflight.check_run(config)]
    try:
        architecture = resolve_model(config.model).architecture
    except InputError:
        raise InputError(problems) from None
    missing = preflight.check_device(config)
    if not problems and not missing:
        problems = preflight.check_room(config)
    print(report(resolved, architecture, missing))
    if problems:
        raise InputError(problems)


def _settled(config: RunConfig, model: Model) -> RunConfig:
    """Fix what depends on the working folder or on chance, so that run.yaml repeats the run."""
    name = model.name if model.card else str(Path(model.name).expanduser().resolve())
    out = config.out or free_folder(Path("runs"), Path(model.name).name)
    data = _with_whole_path(config.data, "tokenizer")
    checkpoint = _with_whole_path(config.checkpoint, "init_from")
    out = out.expanduser().resolve()
    return config.model_copy(
        update={"model": name, "out": out, "data": data, "checkpoint": checkpoint}
    )


def _with_whole_path(section: AnySection, name: str) -> AnySection:
    """Write a path, if there is one, so that it is the same from any folder."""
    path: Path | None = getattr(section, name)
    return section.model_copy(update={name: path.expanduser().resolve() if path else None})


def free_folder(parent: Path, name: str) -> Path:
    """Name the next run of a model: `runs/qwen3-8b-3` behind `runs/qwen3-8b-2`."""
    taken = [0]
    for path in parent.glob(f"{name}-*"):
        number = path.name.removeprefix(f"{name}-")
        if number.isdigit():
            taken.append(int(number))
    return parent / f"{name}-{max(taken) + 1}"


def _prepare(config: RunConfig) -> DataConfig:
    """Tokenize raw data, once."""
    from msllm.cli.data_progress import show_progress
    from msllm.engine.data.cache import prepare_data

    with show_progress() as progress:
        return prepare_data(config.data, progress)
