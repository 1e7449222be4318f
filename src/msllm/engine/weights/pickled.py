"""Reads tensors of a folder of pickled weights: `pytorch_model.bin`, or shards with an index.

Pickles can carry code. They are loaded with `weights_only`, which builds tensors and runs nothing;
what asks for more is refused. The interface is that of `PublishedWeights`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from msllm.engine.weights import transform
from msllm.engine.weights.published import Entry, add, read_index
from msllm.errors import InputError, Problem, first_line
from msllm.models.plain_file import open_file, unreadable
from msllm.models.weight_map import Run

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Types of tensors as torch calls them, and as safetensors does."""


class PickledWeights:
    """The tensors of a folder.

    Files that torch 1.6 or later wrote are mapped: only what is asked for is read. Older ones have
    to be read whole, and one of them at a time stays in memory.

    Raises:
        InputError: There are none, or a file is missing, damaged or holds more than tensors; all
            are told together.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._mapped: dict[Path, dict[str, Tensor]] = {}
        self._read: tuple[Path, dict[str, Tensor]] | None = None
        self._lock = Lock()
        listed = _listed(folder)
        problems: list[Problem] = []
        for file in sorted(set(listed.values())) if listed else [folder / SINGLE]:
            try:
                found = {
                    name: Entry(file, tuple(tensor.shape), _type(tensor), 0, tensor.nbytes)
                    for name, tensor in self._tensors(file).items()
                }
                add(self.entries, found)
            except InputError as error:
                problems += error.problems
        if not problems:
            problems = [
                Problem(f"{name} is not in {file.name}", str(folder / INDEX), "download again")
                for name, file in listed.items()
                if name not in self.entries or self.entries[name].file != file
            ]
        if problems:
            raise InputError(problems)

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        return self.tensor(name).dtype

    def tensor(self, name: str) -> Tensor:
        """A whole tensor; not to be written to, others may see the same bytes."""
        return self._tensors(self.entries[name].file)[name]

    def rows(self, run: Run, columns: tuple[int, int] | None = None) -> Tensor:
        """A run's rows, all columns of them or `(first, count)`, in their own dtype; a copy."""
        found = transform.rows(self.tensor(run.tensor), run)
        return (found if columns is None else found.narrow(1, *columns)).clone()

    def _tensors(self, file: Path) -> dict[str, Tensor]:
        """Map a file, or read it where that can't be done."""
        with self._lock:
            if file in self._mapped:
                return self._mapped[file]
            if self._read is not None and self._read[0] == file:
                return self._read[1]
            if _is_zip(file):
                return self._mapped.setdefault(file, _load(file, mmap=True))
            self._read = None  # before the next is read: there is memory for one
            self._read = (file, _load(file, mmap=False))
            return self._read[1]


def _listed(folder: Path) -> dict[str, Path]:
    """Read the index: the file of each tensor; empty where there is a single file."""
    if (folder / INDEX).exists():
        return read_index(folder / INDEX)
    if (folder / SINGLE).exists():
        return {}
    hint = f"expected {SINGLE}, or shards with {INDEX}"
    raise InputError("there are no pickled weights in the folder", str(folder), hint)


def _is_zip(file: Path) -> bool:
    """Whether it begins as torch's files since 1.6 do."""
    try:
        with open_file(file) as stream:
            return stream.read(4) == b"PK\x03\x04"
    except OSError as error:
        raise unreadable(file, error) from error


def _load(file: Path, mmap: bool) -> dict[str, Tensor]:
    import torch

    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a pickle, damaged in whatever way
        raise refusal(file, error) from error
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise InputError("the pickle is no dictionary of tensors", str(file))
    return found


def refusal(file: Path, error: Exception) -> InputError:
    """Say why a pickle can't be read; torch's own advice, to run what it asks for, is left out."""
    said = str(error)
    # a damaged pickle can look like one that asks for code, but not the other way round
    if isinstance(error, pickle.UnpicklingError) and ("Unsupported" in said or "GLOBAL" in said):
        hint = "take the model's safetensors, or have its publisher convert it"
        what = "it is no pickle of tensors alone; nothing of it was run"
        return InputError(what, str(file), hint)
    if isinstance(error, pickle.UnpicklingError):
        return InputError("damaged: it is no pickle of tensors", str(file), "download it again")
    return InputError(f"damaged: {first_line(error)}", str(file), "download it again")


def _type(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return NAMES.get(name, name)
