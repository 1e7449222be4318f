"""What a new run's weights come from: published ones, or those of a checkpoint.

The names of both kinds of folder, and whether what they hold is the model's, are found here before
anything is done.
"""

from __future__ import annotations

from pathlib import Path

from msllm.engine.training import checkpoint_folder
from msllm.engine.weights import matching
from msllm.errors import InputError, MsllmError, Problem
from msllm.models.architecture import Architecture

INDEX = ".metadata"
"""Of a `torch_dist` checkpoint."""
LATEST = "latest_checkpointed_iteration.txt"


def locate(folder: Path, where: str) -> Path | None:
    """Find the checkpoint that a folder is or holds; None if it holds none.

    That is a checkpoint's own folder, a run's (its newest complete one counts), or one in which
    Megatron-LM keeps iterations.

    Raises:
        InputError: There is one, and it is not complete.
    """
    folder = folder.expanduser()
    if (folder / checkpoint_folder.MANIFEST).exists():
        return checkpoint_folder.open_checkpoint(folder, where).path
    if (folder / INDEX).exists():
        return folder
    if (folder / LATEST).exists():
        return _latest(folder, where)
    if (folder / "checkpoints").is_dir() or any(folder.glob("step-*")):
        return checkpoint_folder.open_checkpoint(folder, where).path
    return None


def _latest(folder: Path, where: str) -> Path:
    name = (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    found = folder / ("release" if name == "release" else f"iter_{name.zfill(7)}")
    if (found / INDEX).exists():
        return found
    ranks = any(found.glob("mp_rank_*"))
    hint = "`msllm convert mindspeed-to-mcore` turns it into one" if ranks else "copy it again"
    raise InputError(f"{found.name} in {folder} is no torch_dist checkpoint", where, hint)


def check(folder: Path, architecture: Architecture, where: str) -> list[Problem]:
    """List what keeps a folder's weights from being those of the model; empty if they fit."""
    try:
        checkpoint = locate(folder, where)
    except MsllmError as error:
        return error.problems
    if checkpoint is None:
        return matching.check(folder.expanduser(), architecture, where)
    from msllm.engine.weights.stored import differences
    from msllm.engine.weights.torch_dist import StoredWeights

    weights = matching.mapped(architecture)
    if weights is None:
        return [matching.unknown(architecture, where)]
    try:
        stored = StoredWeights(checkpoint)
    except MsllmError as error:
        return error.problems
    return matching.first(list(differences(stored, weights, architecture, where)), where)
