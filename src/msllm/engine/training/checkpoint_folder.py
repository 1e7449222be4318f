"""Checkpoint folders that are either complete or not there, whatever moment a process dies at.

A checkpoint is written into `.tmp-step-N`, synced to disk, described by `complete.json`, and only
then renamed to `step-N`. What lies in the folder is the backend's business: this module knows
files and sizes only. Cooperating ranks call `begin` and `commit` on one rank, with a barrier after
the one and before the other.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from msllm.errors import InputError, Problem

logger = logging.getLogger(__name__)

MANIFEST = "complete.json"
FORMAT = 1
_DONE = re.compile(r"step-(\d{8,})")
_TMP = re.compile(r"\.tmp-step-(\d{8,})")
_OLD = re.compile(r"\.old-step-(\d{8,})")


class Manifest(BaseModel):
    """What `complete.json` says. Its presence means that every listed file is on disk, whole."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = FORMAT
    step: int = Field(ge=0)
    consumed_samples: int = Field(0, ge=0)
    layout: dict[str, int] = Field(default_factory=dict)
    architecture: dict[str, Any] = Field(default_factory=dict)
    config_digest: str = ""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Whatever else the writer wants to find again."""
    files: dict[str, int] = Field(default_factory=dict)
    """Size in bytes of each file, by its path inside the folder."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return self.manifest.step


def folder_name(step: int) -> str:
    """Name of a step's folder; names sort like steps."""
    return f"step-{step:08d}"


def begin(root: Path, step: int) -> Path:
    """Make an empty folder to write a step's checkpoint into.

    What an interrupted save of the same step left is removed.
    """
    folder = root / f".tmp-{folder_name(step)}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    sync(root.parent)
    return folder


def commit(folder: Path, manifest: Manifest) -> Checkpoint:
    """Make what was written into `folder` (from `begin`) the checkpoint of its step.

    It is sealed first and renamed last.

    Raises:
        OSError: If the disk can't take it. `folder` is then a leftover that `recover` removes.
    """
    manifest = seal(folder, manifest)
    return Checkpoint(_publish(folder, manifest.step), manifest)


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest of a folder's files, which makes it complete.

    Every file is synced before the manifest is written. `manifest.files` is filled in here.
    """
    files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    for path in files.values():
        sync(path)
    sizes = {name: path.stat().st_size for name, path in files.items() if name != MANIFEST}
    manifest = manifest.model_copy(update={"files": sizes})
    _write_synced(folder / MANIFEST, manifest.model_dump_json(indent=1).encode())
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync(path)
    sync(folder)
    return manifest


def _publish(folder: Path, step: int) -> Path:
    """Rename a finished temporary folder to its final name; what had that name goes away.

    A crash in between leaves the finished temporary folder, which `recover` renames.
    """
    final = folder.parent / folder_name(step)
    if final.exists():
        shutil.rmtree(final)
    os.replace(folder, final)
    sync(folder.parent)
    return final


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems refuse to sync a folder; they have no cache of names to sync.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


def _write_synced(path: Path, data: bytes) -> None:
    """Write a small file so that its name appears only when its content is on disk."""
    new = path.with_name(f".{path.name}.tmp")
    with new.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, path)


def fault_of(path: Path) -> str | None:
    """Say in words why a folder is no complete checkpoint; None if it is one."""
    result = _read(path)
    return result if isinstance(result, str) else None


def _read(path: Path) -> Manifest | str:
    """Read a folder's manifest and check it against the files there; or say what is wrong."""
    if not path.is_dir():
        return "there is no such folder"
    manifest_file = path / MANIFEST
    try:
        if manifest_file.exists() and not manifest_file.is_file():  # a pipe would be waited on
            return f"its {MANIFEST} is no regular file"
        manifest = Manifest.model_validate_json(manifest_file.read_bytes())
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so its save was never finished"
    except OSError as error:
        return f"its {MANIFEST} can't be read: {error.strerror}"
    except ValidationError:
        return f"its {MANIFEST} is damaged"
    if manifest.format > FORMAT:
        return f"it has format {manifest.format}, of a newer msllm (this one reads {FORMAT})"
    for name, size in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found:,} bytes instead of {size:,}"
    return manifest


def _numbered(root: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """List the folders whose name matches, with their step, newest first."""
    if not root.is_dir():
        return []
    found = [(pattern.fullmatch(p.name), p) for p in root.iterdir() if p.is_dir()]
    return sorted(((int(m[1]), p) for m, p in found if m), reverse=True)


def complete(root: Path) -> list[Checkpoint]:
    """List the complete checkpoints in `root`, newest first."""
    read = ((path, _read(path)) for _, path in _numbered(root, _DONE))
    return [Checkpoint(path, manifest) for path, manifest in read if isinstance(manifest, Manifest)]


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest complete checkpoint (None: there is none), and which newer ones are broken."""

    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()


def latest_complete(root: Path) -> Latest:
    """Find the newest complete checkpoint in `root`; changes nothing.

    A newer folder that is not complete (a truncated file, a missing manifest) is passed over,
    with a note that says why.
    """
    notes: list[str] = []
    for _, path in _numbered(root, _DONE):
        manifest = _read(path)
        if isinstance(manifest, Manifest):
            return Latest(Checkpoint(path, manifest), tuple(notes))
        notes.append(f"{path.name} is passed over: {manifest}")
    return Latest(None, tuple(notes))


def open_checkpoint(path: Path, where: str = "--resume") -> Checkpoint:
    """Open a checkpoint named by the user: its folder, or the newest below a run's folder.

    Raises:
        InputError: If there is no complete checkpoint at `path`.
    """
    manifest = _read(path)
    if isinstance(manifest, Manifest):
        return Checkpoint(path, manifest)
    for root in (path, path / "checkpoints"):
        latest = latest_complete(root)
        if latest.checkpoint is not None:
            for note in latest.notes:
                logger.warning("%s", note)
            return latest.checkpoint
    raise InputError(
        Problem(
            f"{path} is not a complete checkpoint: {manifest}",
            where,
            "give a folder like RUN/checkpoints/step-00000100, or the run's folder",
        )
    )


def recover(root: Path) -> list[str]:
    """Tidy what killed processes left; one rank calls it before a run starts or resumes.

    A temporary folder that was finished but not yet renamed gets its name; other leftovers are
    removed. Returns what was done, in words.
    """
    notes = []
    for step, path in _numbered(root, _TMP):
        if fault_of(path) is None and fault_of(root / folder_name(step)) is not None:
            _publish(path, step)
            notes.append(f"{folder_name(step)} was saved but not yet named: recovered")
        else:
            shutil.rmtree(path)
            notes.append(f"removed the unfinished save of step {step}")
    for step, path in _numbered(root, _OLD):
        final = root / folder_name(step)
        if not final.exists() and fault_of(path) is None:
            os.replace(path, final)
            notes.append(f"{final.name} was about to be removed: it is whole, and kept")
        else:
            shutil.rmtree(path)
            notes.append(f"finished the removal of an earlier {final.name}")
    return notes


def prune(root: Path, keep: int) -> list[Path]:
    """Remove complete checkpoints but the newest `keep` (0: keep all); returns what was removed.

    Only durable, complete checkpoints count as kept, so that a save in progress never costs the
    last good one. A folder is renamed before it is emptied: no half of it looks loadable.
    """
    if keep <= 0:
        return []
    removed = []
    for checkpoint in complete(root)[keep:]:
        old = root / f".old-{checkpoint.path.name}"
        if old.exists():
            shutil.rmtree(old)
        os.replace(checkpoint.path, old)
        shutil.rmtree(old, ignore_errors=True)
        removed.append(checkpoint.path)
    return removed


def describe(manifest: Manifest) -> Mapping[str, str]:
    """Put a checkpoint's figures in words, for tables and panels."""
    layout = " ".join(f"{k}{v}" for k, v in manifest.layout.items() if v > 1) or "one process"
    size = sum(manifest.files.values())
    return {
        "step": f"{manifest.step:,}",
        "samples": f"{manifest.consumed_samples:,}",
        "saved with": layout,
        "size": f"{size / 2**20:,.1f} MiB in {len(manifest.files)} files",
    }
