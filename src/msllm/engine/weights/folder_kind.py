"""Tells what a folder of weights is by what lies in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from msllm.engine.training import checkpoint_folder
from msllm.engine.training.checkpoint_folder import MANIFEST, Manifest
from msllm.engine.weights import pickled, published
from msllm.engine.weights.partial import refuse_unfinished
from msllm.errors import InputError
from msllm.models.plain_file import open_file

TRACKER = "latest_checkpointed_iteration.txt"
"""Where Megatron-LM writes which of a folder's iterations is the newest."""
LONGEST_NAME = 100
"""Characters that the name of an iteration may have."""
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


class Kind(StrEnum):
    """Formats of weights."""

    SAFETENSORS = "Hugging Face safetensors"
    PICKLED = "Hugging Face .bin"
    TORCH_DIST = "Megatron-core torch_dist"
    RANKS = "MindSpeed-LLM files of each rank"

    @property
    def is_published(self) -> bool:
        """Whether it is a folder as models are published in."""
        return self in (Kind.SAFETENSORS, Kind.PICKLED)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of weights.

    Attributes:
        asked: The folder that was named.
        path: Where the weights are; a run's newest checkpoint, for one.
        kind: Their format.
        step: Optimizer steps behind them, where known.
        manifest: What msllm wrote down beside them, if it did.
        notes: What was passed over to find them.
    """

    asked: Path
    path: Path
    kind: Kind
    step: int | None = None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()


def find(folder: Path, where: str = "") -> Folder:
    """Say what a folder is.

    Args:
        folder: The folder: of published weights, a checkpoint, or a run, whose newest it is then.
        where: The flag that names it; for messages.

    Raises:
        InputError: There is no such folder, or no weights in it.
    """
    path, where = folder.expanduser(), where or str(folder)
    if not path.is_dir():
        raise InputError(f"there is no folder {folder}", where, "check the path")
    refuse_unfinished(path)
    for kind in (_torch_dist, _ranks, _published, _run):
        found = kind(folder, path)
        if found is not None:
            return found
    hint = "give a folder of Hugging Face weights, a checkpoint, or a run's folder"
    inner = sorted(p for p in path.iterdir() if p.is_dir() and _published(folder, p))
    if inner:
        hint = f"there are weights in {folder / inner[-1].name}"
    raise InputError(f"{folder} holds no weights that msllm knows", where, hint)


def _torch_dist(asked: Path, path: Path) -> Folder | None:
    if not (path / ".metadata").exists():
        return None
    manifest = None
    if (path / MANIFEST).exists():
        fault = checkpoint_folder.fault_of(path)
        if fault is not None:
            raise InputError(f"not a complete checkpoint: {fault}", str(asked))
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    return Folder(asked, path, Kind.TORCH_DIST, manifest.step if manifest else None, manifest)


def _tracked(tracker: Path) -> str:
    """What the tracker file says: the number of an iteration, or a folder's name."""
    with open_file(tracker) as file:
        said = file.read(LONGEST_NAME + 1).decode(errors="replace").strip()
    if not re.fullmatch(rf"[^/\0]{{1,{LONGEST_NAME}}}", said) or said in (".", ".."):
        raise InputError("it names no iteration", str(tracker), "it must be a number, or `release`")
    return said


def _ranks(asked: Path, path: Path) -> Folder | None:
    tracker = path / TRACKER
    if tracker.is_file():
        said = _tracked(tracker)
        step = int(said) if said.isdecimal() else None
        inner = path / (said if step is None else f"iter_{step:07d}")
        if not inner.is_dir():
            raise InputError(f"{inner.name} is missing, which {TRACKER} names", str(asked))
        if (inner / ".metadata").exists():
            found = _torch_dist(asked, inner)
            assert found is not None
            return Folder(asked, inner, found.kind, step)
        return Folder(asked, inner, Kind.RANKS, step)
    if any(RANK_FOLDER.fullmatch(p.name) for p in path.iterdir()):
        named = re.fullmatch(r"iter_(\d+)", path.name)
        return Folder(asked, path, Kind.RANKS, int(named[1]) if named else None)
    return None


def _published(asked: Path, path: Path) -> Folder | None:
    for kind, module in ((Kind.SAFETENSORS, published), (Kind.PICKLED, pickled)):
        if any((path / name).exists() for name in (module.INDEX, module.SINGLE)):
            return Folder(asked, path, kind)
    return None


def _run(asked: Path, path: Path) -> Folder | None:
    for root in (path, path / "checkpoints"):
        latest = checkpoint_folder.latest_complete(root)
        if latest.checkpoint is not None:
            newest = latest.checkpoint
            return Folder(
                asked, newest.path, Kind.TORCH_DIST, newest.step, newest.manifest, latest.notes
            )
    return None
