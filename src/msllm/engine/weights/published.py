"""Reads tensors of a folder of Hugging Face weights: one safetensors file, or shards with an index.

Only headers are read until rows are asked for, and then only those rows. What the tensors mean is
the business of `msllm.models.weight_map`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msllm.errors import InputError, Problem, first_line
from msllm.models.plain_file import open_file, parse_json, read_json, unreadable
from msllm.models.weight_map import Run

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BLOCK_BYTES = 16 * 2**20
"""Read at once, where not all that is read is kept."""
LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
WIDTHS = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2},
    **{"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1},
    "F8_E8M0": 1,
}
"""Bytes of a number of each type, as the format spells it."""


TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""torch's names of the types that are read; torch itself is not imported for a check."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor is, and what.

    Attributes:
        file: The file that holds it.
        shape: Its shape.
        dtype: Its type as the format spells it, "BF16".
        offset: Its first byte in the file.
        size: Its bytes.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int


class PublishedWeights:
    """The tensors of a folder.

    Raises:
        InputError: There are none, a file is missing, or one is damaged; all are told together.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        problems: list[Problem] = []
        listed = _listed(folder)
        for file in sorted(set(listed.values())) if listed else [folder / SINGLE]:
            try:
                add(self.entries, dict(_read_header(file)))
            except InputError as error:
                problems += error.problems
        if problems:
            raise InputError(problems)
        for name, file in listed.items():
            if name not in self.entries or self.entries[name].file != file:
                problems.append(
                    Problem(f"{name} is not in {file.name}", str(folder / INDEX), "download again")
                )
        if problems:
            raise InputError(problems)

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        import torch

        found: torch.dtype = getattr(torch, TORCH_NAMES[self.entries[name].dtype])
        return found

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        entry = self.entries[name]
        found = _read(entry.file, entry.offset, entry.size)
        return found.view(self.dtype(name)).view(entry.shape)

    def rows(self, run: Run, columns: tuple[int, int] | None = None) -> Tensor:
        """A run's rows, all columns of them or `(first, count)`, in their own dtype."""
        last = run.first + (run.count - 1) * run.step + 1
        if run.transposed:
            stored = self.entries[run.tensor].shape[0 if run.expert is None else 1]
            picked = slice(run.first, last, run.step)
            return self._lines(run, columns or (0, stored), picked).t()
        across = None if columns is None else slice(columns[0], sum(columns))
        return self._lines(run, (run.first, max(last - run.first, 0)), across)[:: run.step]

    def _lines(self, run: Run, lines: tuple[int, int], across: slice | None) -> Tensor:
        """Read `(first, count)` lines as they are stored, all of each or some columns.

        They are read, not mapped: a page fault for every 4 KiB costs more than the copy. Where
        columns are cut out no more than a block is in memory beside the result.
        """
        import torch

        entry, dtype = self.entries[run.tensor], self.dtype(run.tensor)
        shape = entry.shape if run.expert is None else entry.shape[1:]
        line = math.prod(shape[1:]) * dtype.itemsize
        start = entry.offset + (run.expert or 0) * shape[0] * line

        def read(first: int, count: int) -> Tensor:
            found = _read(entry.file, start + first * line, count * line)
            return found.view(dtype).view(count, *shape[1:])

        first, count = lines
        if across is None:
            return read(first, count)
        step = max(1, BLOCK_BYTES // max(line, 1))
        blocks = [(at, min(step, first + count - at)) for at in range(first, first + count, step)]
        return torch.cat([read(*block)[:, across] for block in blocks])


def _read(file: Path, offset: int, size: int) -> Tensor:
    """Read bytes of a file.

    Raises:
        InputError: It has become shorter, or can't be read any more.
    """
    import torch

    found = torch.empty(size, dtype=torch.uint8)
    left = found.numpy().data
    try:
        with open_file(file) as stream:
            stream.seek(offset)
            while left and (count := stream.readinto(left)):
                left = left[count:]
    except OSError as error:
        raise unreadable(file, error) from error
    if left:
        raise InputError("it is shorter than it was at the start", str(file), "download it again")
    return found


def _listed(folder: Path) -> dict[str, Path]:
    """Read the index: the file of each tensor; empty where there is a single file."""
    index, where = folder / INDEX, str(folder)
    if not index.exists():
        if (folder / SINGLE).exists():
            return {}
        hint = f"expected {SINGLE}, or shards with {INDEX}"
        raise InputError("there are no weights in the folder", where, hint)
    return read_index(index)


def add(entries: dict[str, Entry], more: dict[str, Entry]) -> None:
    """Take a file's tensors to those of others.

    Raises:
        InputError: One is there already.
    """
    for name in entries.keys() & more.keys():
        one, other = entries[name].file, more[name].file
        problem = f"{name} is in {one.name} and in {other.name}"
        raise InputError(problem, str(other.parent), "download again into a new folder")
    entries |= more


def read_index(index: Path) -> dict[str, Path]:
    """Read which file each tensor is in; both forms of weights write it alike.

    Raises:
        InputError: It can't be read, or names files that are not beside it.
    """
    content = read_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        raise InputError("the index can't be read", str(index), "download it again")
    for file in files.values():
        if not _is_plain(file):
            problem = f"the index names {file!r}, which is no plain file name"
            raise InputError(problem, str(index), "files of weights lie beside it")
    return {name: index.parent / file for name, file in files.items()}


def _is_plain(name: Any) -> bool:
    """Whether it is the name of a file of the same folder."""
    plain = isinstance(name, str) and name not in ("", ".", "..")
    return plain and Path(name).name == name and "\0" not in name


def _header(content: bytes, file: Path) -> Any:
    try:
        return parse_json(content, file)
    except InputError as error:
        raise ValueError(error.problems[0].problem) from error


def _read_header(file: Path) -> Iterator[tuple[str, Entry]]:
    """Read names, shapes and types, and hold the offsets against the file's size."""
    try:
        with open_file(file) as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            size = file.stat().st_size - 8 - length
            if length > LARGEST_HEADER or size < 0:
                raise ValueError("the header is longer than the file")
            header = _header(stream.read(length), file)
        header.pop("__metadata__", None)
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (first, last, *entry["shape"])):
                raise ValueError(f"shape and place of {name} are no whole numbers")
            if first != end or last < first:
                raise ValueError(f"the bytes of {name} do not follow those before")
            end = last
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            if not isinstance(dtype, str):
                raise ValueError(f"the type of {name} is {dtype!r}")
            if dtype in WIDTHS and last - first != math.prod(shape) * WIDTHS[dtype]:
                raise ValueError(f"the bytes of {name} are not as many as its shape says")
            yield name, Entry(file, shape, dtype, 8 + length + first, last - first)
        if end != size:
            raise ValueError(f"it holds {size:,} bytes of tensors, and its header says {end:,}")
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InputError(f"damaged: {first_line(error)}", str(file), "download it again") from error
