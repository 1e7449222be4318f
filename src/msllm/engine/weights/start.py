"""What a new run's weights come from: published ones, or those of a checkpoint.

Whether what a folder holds is the model's is found here, before anything is done.
"""

from __future__ import annotations

from pathlib import Path

from msllm.engine.weights import folder_kind, matching
from msllm.engine.weights.folder_kind import Kind
from msllm.engine.weights.source import shortened
from msllm.errors import InputError, MsllmError, Problem
from msllm.models.architecture import Architecture


def locate(folder: Path, where: str) -> Path | None:
    """Find the checkpoint that a folder is or holds; None for published weights.

    Raises:
        InputError: There is neither, or the checkpoint is not complete.
    """
    found = folder_kind.find(folder, where)
    if found.kind is Kind.RANKS:
        hint = "`msllm convert mindspeed-to-mcore` makes a checkpoint of them"
        raise InputError(f"{folder} is {found.kind.value}", where, hint)
    return found.path if found.kind is Kind.TORCH_DIST else None


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
    return shortened(list(differences(stored, weights, architecture, where)), where)
