"""Reads the pickled index of a checkpoint without running what a pickle may carry.

Only the classes that torch.distributed.checkpoint and Megatron put into an index are made; one that
asks for anything else is refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from msllm.errors import InputError, first_line
from msllm.models.plain_file import open_file

CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED = {
    f"{CHECKPOINT}.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorProperties"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    f"{CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix", "SerializationFormat"},
    f"{CHECKPOINT}.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "megatron.core.dist_checkpointing.strategies.resharding": {"TensorReformulationMetadata"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "builtins": {"set", "frozenset", "slice"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, which is no part of an index; nothing of it was run"
        )


def read_index(path: Path) -> Metadata:
    """Read an index.

    Raises:
        InputError: The file is missing or can't be read.
        ValueError: It is no index, or a pickle that asks for more than one needs.
    """
    try:
        with open_file(path) as file:
            found = _Unpickler(file).load()
    except InputError:
        raise
    except Exception as error:  # a pickle, damaged in whatever way
        raise ValueError(first_line(error)) from error
    if not isinstance(found, Metadata):
        raise ValueError("it is no index of a checkpoint")
    _check(found)
    return found


def _check(index: Metadata) -> None:
    """Hold an index to what one says: a pickle may have anything in any place.

    Raises:
        ValueError: Something in it is of a wrong kind.
    """
    tensors, stored = (getattr(index, key, None) for key in ("state_dict_metadata", "storage_data"))
    if not isinstance(tensors, dict) or not isinstance(stored, dict):
        raise ValueError("it lacks the tensors, or where they are")
    for name, held in tensors.items():
        known = isinstance(held, TensorStorageMetadata) and _is_tensor(held)
        if not isinstance(name, str) or not (known or isinstance(held, BytesStorageMetadata)):
            raise ValueError(f"what it says of {name} can't be understood")
    chunks = {
        (name, tuple(chunk.offsets))
        for name, held in tensors.items()
        if isinstance(held, TensorStorageMetadata)
        for chunk in held.chunks
    }
    for place, info in stored.items():
        name = getattr(place, "fqn", None)
        if not isinstance(place, MetadataIndex) or name not in tensors or not _is_place(info):
            raise ValueError(f"where {name} is can't be understood")
        if not isinstance(tensors[name], TensorStorageMetadata):
            continue
        offset = place.offset
        if offset is None or not _is_box(offset) or (name, tuple(offset)) not in chunks:
            raise ValueError(f"a part of {name} is stored that it does not describe")


def _is_tensor(held: TensorStorageMetadata) -> bool:
    size: Any = getattr(held, "size", None)
    chunks = getattr(held, "chunks", None)
    dtype = getattr(getattr(held, "properties", None), "dtype", None)
    return (
        _is_box(size)
        and isinstance(dtype, torch.dtype)
        and isinstance(chunks, list)
        and all(_is_chunk(chunk, len(size)) for chunk in chunks)
    )


def _is_chunk(chunk: Any, axes: int) -> bool:
    boxes = [getattr(chunk, key, None) for key in ("offsets", "sizes")]
    known = isinstance(chunk, ChunkStorageMetadata) and all(_is_box(box) for box in boxes)
    return known and all(len(box) == axes for box in boxes)  # type: ignore[arg-type]


def _is_box(numbers: Any) -> bool:
    return isinstance(numbers, tuple | list) and all(type(n) is int and n >= 0 for n in numbers)


def _is_place(info: Any) -> bool:
    name, offset, length = (
        getattr(info, key, None) for key in ("relative_path", "offset", "length")
    )
    return (
        isinstance(info, _StorageInfo)
        and isinstance(name, str)
        and "\0" not in name
        and not PurePath(name).is_absolute()
        and ".." not in PurePath(name).parts
        and type(offset) is int
        and type(length) is int
        and offset >= 0
        and length > 0
    )
