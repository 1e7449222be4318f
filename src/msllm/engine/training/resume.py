"""Which checkpoint a run goes on from: asked before it starts, and by its workers.

Needs no torch, so that a run can be refused without it.
"""

from __future__ import annotations

from pathlib import Path

from msllm.config import RunConfig
from msllm.engine.training import checkpoint_folder
from msllm.engine.training.checkpoint_folder import Checkpoint
from msllm.engine.training.run_folder import RunFolder


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
