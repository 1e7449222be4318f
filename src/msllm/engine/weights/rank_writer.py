"""Writes the files of ranks, whose parameters arrive in pieces and in any order.

The pickles are written first, with room for the numbers; the files are mapped then, and pieces
written to where they belong. Memory does not grow with the model, nor with what a rank holds.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.serialization import set_default_mmap_options

from msllm.engine.weights.rank_files import FILE, Rank, folder_name
from msllm.engine.weights.rank_parts import RankParts
from msllm.engine.weights.slice import Slice

ITERATION = 1
"""What converted weights count as; MindSpeed-LLM's own converter has the same."""


class RankWriter:
    """The files of all ranks, being filled; what is never written stays zero.

    Args:
        folder: The iteration's folder.
        parts: What each rank holds.
        types: Type of each parameter.
    """

    def __init__(self, folder: Path, parts: RankParts, types: dict[str, torch.dtype]):
        self._folder, self._parts, self._types = folder, parts, types
        self._holders: dict[str, list[tuple[Slice, Tensor]]] = {}

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(
            math.prod(held.slice.shape) * self._types[held.slice.name].itemsize
            for rank in self._parts.ranks
            for held in self._parts.held(rank)
        )

    def make(self) -> None:
        """Write the files, with room for all numbers.

        Raises:
            OSError: The disk has no room for them.
        """
        for rank in self._parts.ranks:
            path = self._path(rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with torch.serialization.skip_data():
                    torch.save(self._state(rank), path)
            except RuntimeError as error:  # torch does not say what the system said
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            with path.open("r+b") as file:
                size = path.stat().st_size
                os.posix_fallocate(file.fileno(), 0, size)

    def open(self) -> None:
        """Map the files, to be written into."""
        for rank in self._parts.ranks:
            with set_default_mmap_options(mmap.MAP_SHARED):
                state = torch.load(self._path(rank), weights_only=True, mmap=True)
            for held in self._parts.held(rank):
                values = state[self._key(held.chunk)][held.name]
                self._holders.setdefault(held.slice.name, []).append((held.slice, values))

    def place(self, name: str, first: tuple[int, ...], block: Tensor) -> None:
        """Write a block of a parameter, from row (and column) `first`, to all that hold of it."""
        for part, values in self._holders[name]:
            for mine, theirs in part.overlaps(first, tuple(block.shape)):
                values[mine] = block[theirs]

    def _path(self, rank: Rank) -> Path:
        sizes = self._parts.layout
        return self._folder / folder_name(rank, sizes.pp, sizes.ep) / FILE

    def _key(self, chunk: int) -> str:
        return f"model{chunk}" if self._parts.layout.vpp > 1 else "model"

    def _state(self, rank: Rank) -> dict[str, object]:
        """What a file says, its tensors without values yet."""
        models: dict[str, dict[str, Tensor]] = {
            self._key(chunk): {} for chunk in range(self._parts.layout.vpp)
        }
        for held in self._parts.held(rank):
            empty = torch.empty(held.slice.shape, dtype=self._types[held.slice.name])
            models[self._key(held.chunk)][held.name] = empty
        return {**models, "checkpoint_version": 3.0, "iteration": ITERATION}
