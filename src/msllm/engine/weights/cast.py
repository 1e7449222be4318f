"""Copies weights with numbers of another type: Hugging Face folders and checkpoints.

Nothing else changes: names, shapes, tokenizer, optimizer state, integers; only the type that the
config names follows. Weights go block by block; memory does not grow with the model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from msllm.engine.training import checkpoint_folder
from msllm.engine.training.checkpoint_folder import MANIFEST
from msllm.engine.weights import as_parameters, matching, sidecar, torch_dist, transform
from msllm.engine.weights.conversion import Conversion
from msllm.engine.weights.folder_kind import Folder, Kind, find
from msllm.engine.weights.partial import Part, PartialFolder, Progress, check_out
from msllm.engine.weights.published_writer import SHARD_BYTES, Planned, PublishedWriter
from msllm.engine.weights.torch_dist import METADATA, Entry, StoredWeights
from msllm.errors import InputError, Problem
from msllm.models.hf_config import read_config
from msllm.models.plain_file import open_file
from msllm.models.weight_map import Run

BLOCK = 2**23
"""Numbers cast at a time."""
PART_BYTES = 2**30
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types that are cast; others are kept as they are."""


def cast(
    source: Path,
    out: Path,
    dtype: torch.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
    strict: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Conversion:
    """Copy `source` to `out`, its weights as `dtype`.

    Args:
        source: A folder of Hugging Face weights, a checkpoint, or a run: its newest.
        out: The folder to be made.
        dtype: The new type of floating-point numbers.
        shard_bytes: Most bytes in a file of Hugging Face weights.
        strict: Whether values that are no finite numbers are an error, also those that `dtype`
            can't hold: they become infinite.
        progress: Called now and then.

    Returns:
        What was done; `not_finite` names the tensors with values that became infinite, and
        `warnings` those that had such before.

    Raises:
        InputError: The source is damaged, or of a kind that is not cast.
        InputError: The disk is full.
    """
    folder = find(source)
    if folder.kind is Kind.RANKS:
        hint = "`msllm convert mindspeed-to-mcore` takes --dtype"
        raise InputError(f"{source} is {folder.kind.value}", str(source), hint)
    problems = check_out(out)
    inside = out.expanduser().resolve().is_relative_to(folder.path.resolve())
    if inside and not folder.kind.is_published:
        problems.append(
            Problem("the copy would be a part of itself", "--out", "name another place")
        )
    if problems:
        raise InputError(problems)
    job: _Published | _Stored
    if folder.kind.is_published:
        job = _Published(folder, dtype, shard_bytes)
    else:
        job = _Stored(folder, dtype)
    with PartialFolder(out, job.identity()) as partial:
        parts = job.parts(partial.path)
        job.open(partial, parts)
        records = partial.run(parts, progress)
        lost = sorted({name for record in records for name in record["lost"]})
        bad = sorted({name for record in records for name in record["not_finite"]})
        if strict and (lost or bad):
            partial.discard()
            problems = [matching.not_finite(bad, str(source))] if bad else []
            raise InputError(problems + ([_overflow(lost, dtype, source)] if lost else []))
        job.finish(partial.path, records)
        partial.publish(job.seal)
    return Conversion(
        tensors=job.tensors,
        bytes=sum(part.size for part in parts),
        seconds=partial.seconds,
        not_finite=tuple(lost),
        warnings=tuple(f"not all values of {name} are finite numbers" for name in bad),
    )


def _overflow(names: list[str], dtype: torch.dtype, source: Path) -> Problem:
    """Say which tensors have values that a type can't hold."""
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if names[6:] else "")
    hint = "use bf16, or leave out --strict: they become infinite"
    return Problem(f"{_name(dtype)} can't hold all values of {shown}", str(source), hint)


class _Published:
    """A folder of Hugging Face weights."""

    def __init__(self, folder: Folder, dtype: torch.dtype, shard_bytes: int):
        self._folder, self._dtype, self._shard_bytes = folder.path, dtype, shard_bytes
        self._config = _followed(folder.path, dtype)
        self._beside = sidecar.files(folder.path)
        _check_readable(self._beside)
        self._held = as_parameters.published(folder.path)
        self._planned = {}
        for name, entry in self._held.entries.items():
            found = self._held.dtype(name)
            if found.is_floating_point and found not in DTYPES:
                raise InputError(
                    f"{name} is {_name(found)}: the weights are quantized",
                    str(folder.asked),
                    "`msllm convert hf-to-mcore` multiplies scales in, and mcore-to-hf goes back",
                )
            self._planned[name] = Planned(entry.shape, dtype if found in DTYPES else found)
        self.tensors = len(self._planned)
        self._writer: PublishedWriter | None = None

    def identity(self) -> dict[str, Any]:
        files = sorted({entry.file for entry in self._held.entries.values()})
        stats = [(str(file.absolute()), file.stat()) for file in files]
        return {
            "to": f"hf as {self._dtype}, files of {self._shard_bytes}",
            "cut": PART_BYTES,
            "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        }

    def parts(self, _: Path) -> list[Part]:
        parts: list[Part] = []
        names: list[str] = []
        for name, tensor in self._planned.items():
            if names and sum(self._planned[n].size for n in names) + tensor.size > PART_BYTES:
                parts.append(self._part(names))
                names = []
            names.append(name)
        return [*parts, self._part(names)]

    def _part(self, names: list[str]) -> Part:
        def do(advance: Callable[[int], None]) -> dict[str, Any]:
            assert self._writer is not None
            seen = _Seen()
            for name in names:
                self._cast(name, self._writer, seen)
                advance(self._planned[name].size)
            return seen.record()

        return Part(sum(self._planned[name].size for name in names), do)

    def _cast(self, name: str, writer: PublishedWriter, seen: _Seen) -> None:
        """Copy a tensor, some rows at a time."""
        planned = self._planned[name]
        count, *row = planned.shape or (1,)
        step = max(1, BLOCK // max(math.prod(row), 1))
        for first in range(0, count, step):
            run = Run(name, first, min(step, count - first))
            values = self._held.rows(run)
            new = values.to(planned.dtype)
            seen.look(name, new, values)
            writer.write(run, new)

    def open(self, partial: PartialFolder, parts: list[Part]) -> None:
        self._writer = PublishedWriter.within(partial, self._planned, self._shard_bytes)

    def finish(self, folder: Path, _: list[Any]) -> None:
        for file in self._beside:
            shutil.copyfile(file, folder / file.name)
        if self._config is not None:
            (folder / sidecar.CONFIG).write_bytes(self._config)

    def seal(self, _: Path) -> None:
        """There is nothing to be sealed."""


class _Stored:
    """A `torch_dist` checkpoint: weights are cast, anything else is copied byte for byte."""

    def __init__(self, folder: Folder, dtype: torch.dtype):
        self._folder, self._dtype, self._manifest = folder.path, dtype, folder.manifest
        self._config = _followed(folder.path / sidecar.FOLDER, dtype)
        self._stored = StoredWeights(folder.path)
        faults = list(self._stored.faults())
        if faults:
            raise InputError(faults)
        self._files = self._stored.entries()
        written = {folder.path / name for name in (*self._files, METADATA, MANIFEST)}
        found = sorted(path for path in folder.path.rglob("*") if path.is_file())
        self._beside = [path for path in found if path not in written]
        _check_readable(found)
        self._cast = {key for key, held in self._stored.tensors.items() if held.dtype in DTYPES}
        self.tensors = len(self._stored.tensors)

    def identity(self) -> dict[str, Any]:
        index = (self._folder / METADATA).stat()
        source = (str(self._folder.absolute()), index.st_size, index.st_mtime_ns)
        return {"to": f"torch_dist as {self._dtype}", "from": source}

    def parts(self, folder: Path) -> list[Part]:
        return [self._part(name, entries, folder) for name, entries in self._files.items()]

    def _part(self, name: str, entries: list[Entry], folder: Path) -> Part:
        def do(advance: Callable[[int], None]) -> dict[str, Any]:
            places, seen = [], _Seen()
            path = self._folder / name
            with open_file(path) as source, (folder / name).open("wb") as out:
                for entry in entries:
                    start = out.tell()
                    if entry.index.fqn in self._cast:
                        values = self._stored.read_entry(name, entry)
                        new = values.to(self._dtype)
                        seen.look(entry.index.fqn, new, values)
                        torch_dist.save(new, out)
                    else:
                        source.seek(entry.offset)
                        _copy(source, out, entry.length, path)
                    places.append((start, out.tell() - start))
                    advance(self._size(entry))
            return seen.record() | {"places": places}

        return Part(sum(self._size(entry) for entry in entries), do, folder / name)

    def _size(self, entry: Entry) -> int:
        """Bytes that an entry takes, about: the pickle around its numbers does not change."""
        if entry.index.fqn not in self._cast:
            return entry.length
        held = self._stored.tensors[entry.index.fqn].dtype.itemsize
        return math.ceil(entry.length * self._dtype.itemsize / held)

    def open(self, partial: PartialFolder, parts: list[Part]) -> None:
        """Each part makes a file of its own."""
        undone = (p.size for n, p in enumerate(parts) if partial.record(n) is None)
        partial.check_room(sum(undone))

    def finish(self, folder: Path, records: list[Any]) -> None:
        moved = {
            name: [
                Entry(entry.index, start, length)
                for entry, (start, length) in zip(entries, record["places"], strict=True)
            ]
            for (name, entries), record in zip(self._files.items(), records, strict=True)
        }
        self._stored.copy_index(folder, moved, dict.fromkeys(self._cast, self._dtype))
        for path in self._beside:
            copy = folder / path.relative_to(self._folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        if self._config is not None:
            (folder / sidecar.FOLDER / sidecar.CONFIG).write_bytes(self._config)

    def seal(self, folder: Path) -> None:
        if self._manifest is not None:
            checkpoint_folder.seal(folder, self._manifest)


class _Seen:
    """Tensors with values that are no finite numbers, and with such that were before the cast."""

    def __init__(self) -> None:
        self._lost: set[str] = set()
        self._not_finite: set[str] = set()

    def look(self, name: str, new: Tensor, old: Tensor) -> None:
        """Look at numbers of a tensor, after the cast and before it."""
        if not new.is_floating_point() or transform.is_finite(new):
            return
        if not transform.is_finite(old):
            self._not_finite.add(name)
        if _has_lost(new, old):
            self._lost.add(name)

    def record(self) -> dict[str, Any]:
        """What was seen, as JSON has it."""
        return {"lost": sorted(self._lost), "not_finite": sorted(self._not_finite)}


def _has_lost(new: Tensor, old: Tensor) -> bool:
    """Whether finite values became infinite."""
    if new.dtype == old.dtype:
        return False
    return bool((torch.isfinite(old) & ~torch.isfinite(new)).any())


def _check_readable(files: list[Path]) -> None:
    """Refuse files that can't be opened, before any work."""
    for file in files:
        with open_file(file):
            pass


def _copy(source: BinaryIO, out: BinaryIO, length: int, path: Path) -> None:
    while length:
        data = source.read(min(length, 2**24))
        if not data:
            hint = "copy the checkpoint again"
            raise InputError("it is shorter than it was at the start", str(path), hint)
        out.write(data)
        length -= len(data)


def _followed(folder: Path, dtype: torch.dtype) -> bytes | None:
    """A folder's config that names the new type, under the keys under which it names one.

    Raises:
        InputError: It can't be read.
    """
    if not (folder / sidecar.CONFIG).exists():
        return None
    config = read_config(folder)
    found = [
        (part, key)
        for part in (config, config.get("text_config"))
        if isinstance(part, dict)
        for key in sidecar.DTYPE_KEYS
        if key in part
    ]
    for part, key in found or [(config, "torch_dtype")]:
        part[key] = _name(dtype)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
