"""Reads tensors of a folder of Hugging Face weights: one safetensors file, or shards with an index.

Only headers are read until rows are asked for, and then only those rows. What the tensors mean is
the business of `msllm.models.weight_map`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msllm.errors import InputError, Problem

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor is, and what: `dtype` as the format spells it, "BF16"."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class PublishedWeights:
    """The tensors of a folder.

    Raises:
        InputError: There are none, a file is missing, or one is damaged; all are told together.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._open: dict[Path, Any] = {}
        problems: list[Problem] = []
        listed = _listed(folder)
        for file in sorted(set(listed.values())) if listed else [folder / SINGLE]:
            try:
                self.entries |= dict(_read_header(file))
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

    def rows(
        self, name: str, first: int, count: int, columns: tuple[int, int] | None = None
    ) -> Tensor:
        """Read rows of a tensor, all columns of them or `(first, count)`; in its own dtype."""
        entry = self.entries[name]
        if entry.file not in self._open:
            from safetensors import safe_open

            # one handle a file; the pages it maps are the system's to drop
            self._open[entry.file] = safe_open(entry.file, framework="pt")
        part = self._open[entry.file].get_slice(name)
        if columns is None:
            found: Tensor = part[first : first + count]
        else:
            found = part[first : first + count, columns[0] : columns[0] + columns[1]]
        return found


def _listed(folder: Path) -> dict[str, Path]:
    """Read the index: the file of each tensor; empty where there is a single file."""
    index, where = folder / INDEX, str(folder)
    if not index.exists():
        if (folder / SINGLE).exists():
            return {}
        hint = f"expected {SINGLE}, or shards with {INDEX}"
        if any(folder.glob("*.bin")):
            hint = "only safetensors are read: save them with transformers' save_pretrained"
        raise InputError("there are no weights in the folder", where, hint)
    return read_index(index)


def read_index(index: Path) -> dict[str, Path]:
    """Read which file each tensor is in; both forms of weights write it alike.

    Raises:
        InputError: It can't be read.
    """
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): index.parent / Path(file).name for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError("the index can't be read", str(index), "download it again") from error


def _read_header(file: Path) -> Iterator[tuple[str, Entry]]:
    """Read names, shapes and types, and hold the offsets against the file's size."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            size = file.stat().st_size - 8 - length
            if length > LARGEST_HEADER or size < 0:
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if first != end or last < first:
                raise ValueError(f"the bytes of {name} do not follow those before")
            end = last
            yield name, Entry(file, tuple(entry["shape"]), str(entry["dtype"]))
        if end != size:
            raise ValueError(f"it holds {size:,} bytes of tensors, and its header says {end:,}")
    except FileNotFoundError:
        raise InputError(f"{file.name} is missing", str(file.parent), "download it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InputError(
            f"damaged: {str(error).splitlines()[0]}", str(file), "download it again"
        ) from error
