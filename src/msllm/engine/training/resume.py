"""Which checkpoint a run goes on from, and what keeps it from going on.

Asked before a run starts, without torch, and by its workers. That the settings are those of the
run is `run_identity`'s to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msllm.config import RunConfig
from msllm.engine.training import checkpoint_folder
from msllm.engine.training.checkpoint_folder import Checkpoint, Manifest
from msllm.engine.training.run_folder import RunFolder
from msllm.errors import Problem
from msllm.models.resolve import resolve_model

SHOWN = 4


def find(resume: str, folder: RunFolder | None) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The checkpoint to go on from, as `checkpoint.resume` says, and notes on broken ones.

    Args:
        resume: `auto`, `never` or a checkpoint's folder.
        folder: The run's; None where it is yet to be named.

    Raises:
        InputError: `resume` names a folder without a complete checkpoint.
    """
    if resume not in ("auto", "never"):
        return checkpoint_folder.open_checkpoint(Path(resume), f"--resume {resume}"), ()
    if resume == "never" or folder is None:
        return None, ()
    latest = checkpoint_folder.latest_complete(folder.checkpoints)
    return latest.checkpoint, latest.notes


def checkpoint_of(config: RunConfig) -> Checkpoint | None:
    """The checkpoint that a run with this config goes on from; None if it starts anew.

    Raises:
        InputError: As `find`.
    """
    folder = RunFolder(config.out.expanduser()) if config.out else None
    return find(config.checkpoint.resume, folder)[0]


def check_steps(config: RunConfig, checkpoint: Checkpoint) -> list[Problem]:
    """Refuse fewer steps than are done; as many leave nothing to do, see `finished_at`."""
    steps, done = config.train.steps, checkpoint.step
    if steps >= done:
        return []
    where = f"--steps {steps}"
    return [Problem(f"the run is already at step {done}", where, f"give more than {done}")]


def finished_at(config: RunConfig) -> int | None:
    """The run's last step if its checkpoint is there already; None if there is work to do."""
    checkpoint = checkpoint_of(config)
    done = checkpoint is not None and checkpoint.step == config.train.steps
    return config.train.steps if done else None


def check_inputs(config: RunConfig, checkpoint: Checkpoint) -> list[Problem]:
    """Refuse to go on with other files than the run was trained on, under the same names.

    A checkpoint of another folder may be gone on from with any; one written before files were
    marked says nothing of them.
    """
    if config.out is None:
        return []
    out = config.out.expanduser().resolve()
    if not checkpoint.path.resolve().is_relative_to(out):
        return []
    changed = [*_changed_files(config, checkpoint.manifest), *_changed_model(config, checkpoint)]
    if not changed:
        return []
    return [
        Problem(
            f"changed since the run was saved at step {checkpoint.step}: {', '.join(changed)}",
            f"--out {config.out}",
            "restore what was there, or give another --out for a new run",
        )
    ]


def _changed_files(config: RunConfig, manifest: Manifest) -> Iterator[str]:
    """List the files of tokens, and the tokenizer's folder, that have other marks than before."""
    from msllm.engine.data.cache import locate_data
    from msllm.engine.data.fingerprint import fingerprint

    earlier = manifest.extra.get("inputs")
    if not earlier:
        return
    now = fingerprint(locate_data(config.data))
    yield from (path for path, mark in now.items() if earlier.get(path, mark) != mark)


def _changed_model(config: RunConfig, checkpoint: Checkpoint) -> Iterator[str]:
    """Say what of the shape that a model's folder gives is not as it was."""
    model = resolve_model(config.model)
    if model.card is None:
        now = json.loads(json.dumps(asdict(model.architecture)))
        found = list(differences(checkpoint.manifest.architecture, now))
        if found:
            yield f"the config.json in {config.model} ({'; '.join(found[:SHOWN])})"


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """Compare what both name: another version of msllm may know more of a shape, or less."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() & new.keys():
            yield from differences(old[key], new[key], f"{name}.{key}".removeprefix("."))
    elif old != new:
        yield f"{name} was {old!r} and now is {new!r}"
