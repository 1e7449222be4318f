"""Reads the pickled index of a checkpoint without running what a pickle may carry.

Only the classes that torch.distributed.checkpoint and Megatron put into an index are made; one that
asks for anything else is refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

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
        OSError: It can't be read.
        ValueError: It is no index, or a pickle that asks for more than one needs.
    """
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except OSError:
        raise
    except Exception as error:  # a pickle, damaged in whatever way
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(lines[0]) from error
    if not isinstance(found, Metadata):
        raise ValueError("it is no index of a checkpoint")
    return found
