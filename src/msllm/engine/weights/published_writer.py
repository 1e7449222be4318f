"""Writes a folder of Hugging Face weights whose tensors arrive in pieces, in any order.

The files are made at their full size first, headers and all, and pieces are written to where they
belong: nothing has to be collected, and a disk that is too small says so before the work.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from msllm.engine.weights import transform
from msllm.engine.weights.partial import PartialFolder
from msllm.engine.weights.published import INDEX, SINGLE, TORCH_NAMES
from msllm.models.weight_map import Run

NAMES = {getattr(torch, ours): name for name, ours in TORCH_NAMES.items()}
SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in a file, if no tensor is larger; what transformers had as its default."""
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written: its shape and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Location:
    file: Path
    offset: int


class PublishedWriter:
    """The files of a folder's weights, being filled.

    Args:
        folder: The folder.
        tensors: All tensors, in the order in which they are to lie in the files.
        shard_bytes: Most bytes in a file.
        fill: The files are there already and are filled up.

    Raises:
        OSError: The disk can't hold them.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Planned],
        shard_bytes: int = SHARD_BYTES,
        fill: bool = False,
    ):
        self._fill = fill
        self._tensors = tensors
        self._locations: dict[str, _Location] = {}
        shards = _shards(tensors, shard_bytes)
        listed: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else _shard_name(number, len(shards))
            self._make(folder / name, names)
            listed |= dict.fromkeys(names, name)
        if len(shards) > 1:
            total = sum(tensor.size for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    @classmethod
    def within(
        cls, partial: PartialFolder, tensors: Mapping[str, Planned], shard_bytes: int
    ) -> PublishedWriter:
        """Make the files of a conversion, or go on in those that an interrupted run has made.

        Raises:
            InputError: The disk can't hold them.
        """
        size = sum(tensor.size for tensor in tensors.values())
        partial.prepare(size, lambda: cls(partial.path, tensors, shard_bytes))
        return cls(partial.path, tensors, shard_bytes, fill=True)

    def _make(self, path: Path, names: list[str]) -> None:
        """Write a file's header and have the system reserve the room behind it."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            tensor = self._tensors[name]
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.size],
            }
            end += tensor.size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        start = 8 + len(text)
        for name in names:
            first = header[name]["data_offsets"][0]  # type: ignore[index]
            self._locations[name] = _Location(path, start + first)
        if self._fill:
            return
        with path.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            os.posix_fallocate(out.fileno(), 0, start + end)

    def write(self, run: Run, block: Tensor, first_column: int = 0) -> None:
        """Write a run's rows, or columns of them from `first_column` on; cast to its type.

        Whole rows that lie together are written; others are put into the mapped file, where each
        page costs more than that.
        """
        planned, location = self._tensors[run.tensor], self._locations[run.tensor]
        shape = planned.shape if run.expert is None else planned.shape[1:]
        whole = not run.transposed and block.shape[1:] == shape[1:]
        if not whole or (run.step > 1 and run.count > 1):
            target = transform.rows(self._mapped(run.tensor), run)
            target = target if block.dim() == 1 else target.narrow(1, first_column, block.size(1))
            target.copy_(block)
            return
        line = math.prod(shape[1:]) * planned.dtype.itemsize
        start = location.offset + ((run.expert or 0) * shape[0] + run.first) * line
        data = block.to(planned.dtype).contiguous().view(-1).view(torch.uint8).numpy().data
        _write(location.file, start, data)

    def _mapped(self, name: str) -> Tensor:
        """A tensor of the files: what is written into it is in the file."""
        planned, location = self._tensors[name], self._locations[name]
        if not planned.size:
            return torch.empty(planned.shape, dtype=planned.dtype)
        data = np.memmap(location.file, mode="r+", offset=location.offset, shape=planned.size)
        return torch.from_numpy(data).view(planned.dtype).view(planned.shape)


def _write(file: Path, offset: int, data: memoryview) -> None:
    with file.open("r+b", buffering=0) as out:
        out.seek(offset)
        while data:
            data = data[out.write(data) :]


def _shards(tensors: Mapping[str, Planned], most: int) -> list[list[str]]:
    """Spread tensors, in order, over files; the widest types first in each, so that all align."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.size > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.size
    return [sorted(names, key=lambda n: -tensors[n].dtype.itemsize) for names in shards]


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"
