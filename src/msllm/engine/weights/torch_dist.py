"""Reads and writes the tensors of a Megatron `torch_dist` checkpoint piece by piece.

Megatron's format is that of torch.distributed.checkpoint: files of saved tensors, one behind the
other, and a pickled index of them. Whole tensors are never put together here, and no process group
is needed: a piece is in memory, and no more.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import set_crc32_options

from msllm.engine.weights.index_file import read_index
from msllm.engine.weights.tiling import Box, tiles
from msllm.errors import InputError, Problem, first_line
from msllm.models.plain_file import open_file

KIND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

METADATA = ".metadata"
"""The index's file."""
OPTIMIZER = "optimizer."
"""What the names of the optimizer's tensors begin with."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stored tensor: what one read or write moves."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Written:
    """Where a piece is: `length` bytes from `offset` of a file of the checkpoint."""

    piece: Piece
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A saved tensor's piece, or other object, of a file: `length` bytes from `offset`."""

    index: MetadataIndex
    offset: int
    length: int


def save(values: Tensor, out: BinaryIO) -> None:
    """Write a tensor as `torch.save` does, without checksums, which `torch.load` never looks at.

    Raises:
        OSError: The disk can't take it; torch itself only tells of an unexpected position.
    """
    set_crc32_options(False)
    stream = _Stream(out)
    try:
        torch.save(values, stream)  # type: ignore[arg-type]
    except RuntimeError:
        if stream.failed is not None:
            raise stream.failed from None
        raise


class _Stream:
    """A file that remembers what went wrong in writing."""

    def __init__(self, out: BinaryIO):
        self._out = out
        self.failed: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._out.write(data)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        self._out.flush()


def write(path: Path, pieces: Iterable[Piece], read: Callable[[Piece], Tensor]) -> list[Written]:
    """Write pieces into one file, each read when its turn has come.

    Raises:
        OSError: The disk can't take them.
    """
    done = []
    with path.open("wb") as out:
        for piece in pieces:
            offset, values = out.tell(), read(piece)
            if values.untyped_storage().nbytes() != values.nbytes:
                values = values.clone()  # else all of what it is a view on is saved
            save(values.view(piece.sizes), out)
            done.append(Written(piece, path.name, offset, out.tell() - offset))
    return done


def finish(folder: Path, tensors: dict[str, StoredTensor], written: Iterable[Written]) -> None:
    """Write the index of all pieces, and what else Megatron expects in the folder."""
    described = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), []
        )
        for key, tensor in tensors.items()
    }
    results = []
    for done in written:
        offsets = torch.Size(done.piece.offsets)
        chunk = ChunkStorageMetadata(offsets, torch.Size(done.piece.sizes))
        described[done.piece.key].chunks.append(chunk)
        info = _StorageInfo(done.file, done.offset, done.length)
        results.append(WriteResult(MetadataIndex(done.piece.key, offsets), done.length, info))
    index = Metadata(state_dict_metadata=dict(described))
    FileSystemWriter(folder, sync_files=False).finish(index, [results])
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(KIND))


class StoredWeights:
    """The tensors of a checkpoint.

    Attributes:
        tensors: Those of the model.
        optimizer: Those of the optimizer.

    Raises:
        InputError: The folder's index can't be read.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._index = read_index(folder / METADATA)
        except ValueError as error:
            what, where = f"the checkpoint's index is damaged: {error}", str(folder / METADATA)
            raise InputError(what, where, "copy the checkpoint again") from error
        self.tensors: dict[str, StoredTensor] = {}
        self.optimizer: dict[str, StoredTensor] = {}
        self._chunks: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        for key, entry in self._index.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                group = self.optimizer if key.startswith(OPTIMIZER) else self.tensors
                group[key] = StoredTensor(tuple(entry.size), entry.properties.dtype)
                for chunk in entry.chunks:
                    self._chunks[key, tuple(chunk.offsets)] = tuple(chunk.sizes)

    def pieces(self) -> Iterator[Written]:
        """List the pieces in the order in which files hold them."""
        found = []
        for index, info in self._index.storage_data.items():
            if index.fqn in self.tensors:
                piece = Piece(index.fqn, tuple(index.offset), self._sizes(index))
                found.append(Written(piece, info.relative_path, info.offset, info.length))
        yield from sorted(found, key=lambda piece: (piece.file, piece.offset))

    def entries(self) -> dict[str, list[Entry]]:
        """All that is stored, tensors and other objects, by file and in each file's order."""
        found: dict[str, list[Entry]] = {}
        for index, info in self._index.storage_data.items():
            entry = Entry(index, info.offset, info.length)
            found.setdefault(info.relative_path, []).append(entry)
        for entries in found.values():
            entries.sort(key=lambda entry: entry.offset)
        return dict(sorted(found.items()))

    def copy_index(
        self, folder: Path, files: dict[str, list[Entry]], types: dict[str, torch.dtype]
    ) -> None:
        """Write the index of a copy whose entries lie elsewhere and are of other types."""
        index = copy.deepcopy(self._index)
        for key, dtype in types.items():
            entry = index.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)
            entry.properties.dtype = dtype
        index.storage_data = {
            entry.index: _StorageInfo(file, entry.offset, entry.length)
            for file, entries in files.items()
            for entry in entries
        }
        with (folder / METADATA).open("wb") as out:
            pickle.dump(index, out)

    def faults(self) -> Iterator[Problem]:
        """What is missing: files, ends of files, parts of tensors."""
        held: dict[str, list[Box]] = {key: [] for key in self.tensors}
        ends: dict[str, int] = {}
        for written in self.pieces():
            held[written.piece.key].append((written.piece.offsets, written.piece.sizes))
            end = written.offset + written.length
            ends[written.file] = max(end, ends.get(written.file, 0))
        for name, end in ends.items():
            path = self.folder / name
            if not path.is_file():
                yield Problem(f"{name} is missing", str(self.folder), "copy the checkpoint again")
            elif path.stat().st_size < end:
                yield Problem("cut short", str(path), "copy the checkpoint again")
        for key, boxes in held.items():
            shape = self.tensors[key].shape
            count = sum(math.prod(sizes) for _, sizes in boxes)
            if count < math.prod(shape):
                yield Problem(f"parts of {key} are missing", str(self.folder))
            elif not tiles(shape, boxes):
                yield Problem(f"parts of {key} overlap, or lie outside of it", str(self.folder))

    def _sizes(self, index: MetadataIndex) -> tuple[int, ...]:
        return self._chunks[index.fqn, tuple(index.offset or ())]

    def _check(self, values: Any, piece: Piece) -> None:
        """Hold what was read against the index."""
        if not isinstance(values, Tensor) or values.layout is not torch.strided:
            raise ValueError(f"{piece.key} is no plain tensor")
        if tuple(values.shape) != piece.sizes:
            raise ValueError(f"{piece.key} is of another shape")
        wanted = (self.tensors.get(piece.key) or self.optimizer[piece.key]).dtype
        if values.dtype != wanted:
            raise ValueError(f"{piece.key} is {values.dtype}, and the index says {wanted}")

    def read_entry(self, file: str, entry: Entry) -> Tensor:
        """Read an entry that is a piece of a tensor.

        Raises:
            InputError: The file is damaged.
        """
        index = entry.index
        piece = Piece(index.fqn, tuple(index.offset or ()), self._sizes(index))
        return self.read(Written(piece, file, entry.offset, entry.length))

    def read(self, held: Written) -> Tensor:
        """Read one piece.

        Raises:
            InputError: The file is damaged.
        """
        path = self.folder / held.file
        try:
            with open_file(path) as file:
                view = cast(BinaryIO, _create_file_view(file, held.offset, held.length))
                values = torch.load(view, map_location="cpu", weights_only=True)
            self._check(values, held.piece)
        except InputError:
            raise
        except Exception as error:
            hint = "copy or save the checkpoint again"
            raise InputError(f"damaged: {first_line(error)}", str(path), hint) from error
        return values
