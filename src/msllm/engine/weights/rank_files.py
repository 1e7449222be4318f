"""The files of older Megatron and MindSpeed-LLM: one pickle of weights for each model rank.

`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`: tensor, pipeline and expert rank; the latter two only
where there are several. Files are mapped: of tensors, only what is used is read. They also hold
settings and random states, as objects of whatever classes the training had: none of those classes
is imported and none of their code run, inert stand-ins take their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from msllm.engine.weights.folder_kind import RANK_FOLDER
from msllm.engine.weights.pickled import refusal
from msllm.errors import InputError, Problem
from msllm.models.plain_file import open_file

FILE = "model_optim_rng.pt"
EMBEDDING = "embedding.word_embeddings.weight"


class _Inert:
    """Takes the place of a pickled object that is not needed."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, slots=True)
class Rank:
    """A model rank's place."""

    tp: int
    pp: int
    ep: int


def folder_name(rank: Rank, pp: int, ep: int) -> str:
    """Name of a rank's folder, among `pp` pipeline stages and `ep` groups of experts."""
    stage = f"_{rank.pp:03d}" if pp > 1 else ""
    expert = f"_{rank.ep:03d}" if ep > 1 else ""
    return f"mp_rank_{rank.tp:02d}{stage}{expert}"


class RankFiles:
    """The files of an iteration's folder, opened.

    Attributes:
        models: What each rank holds: the parameters of each of its pipeline chunks, by local name.
        tp: Tensor parallel ranks; likewise `pp` and `ep`.
        vpp: Pipeline chunks of a stage.

    Raises:
        InputError: Files are missing or damaged; all are told together.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        found = {}
        for path in sorted(folder.iterdir()):
            name = RANK_FOLDER.fullmatch(path.name)
            if name is not None:
                found[tuple(int(n) for n in name.groups() if n is not None)] = path / FILE
        if not found or len({len(numbers) for numbers in found}) > 1:
            raise InputError("there are no files of ranks, or of several layouts", str(folder))
        loaded, problems = {}, []
        for numbers, file in found.items():
            try:
                loaded[numbers] = _load(file)
            except InputError as error:
                problems += error.problems
        if problems:
            raise InputError(problems)
        self.models = {_rank(numbers, loaded): models for numbers, models in loaded.items()}
        self.paths = {_rank(numbers, loaded): file for numbers, file in found.items()}
        self.tp = 1 + max(rank.tp for rank in self.models)
        self.pp = 1 + max(rank.pp for rank in self.models)
        self.ep = 1 + max(rank.ep for rank in self.models)
        self.vpp = max(len(models) for models in self.models.values())

    def layout(self) -> dict[str, int]:
        """The parallel sizes by name."""
        return {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep}

    def label(self, rank: Rank) -> str:
        """Name of a rank's folder."""
        return folder_name(rank, self.pp, self.ep)

    def missing(self, rank: Rank) -> Problem:
        """Say that a rank's file is missing."""
        name = f"{self.label(rank)}/{FILE}"
        return Problem(f"{name} is missing", str(self.folder), "copy the checkpoint again")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, named by file, chunk and local name."""
        for rank, models in self.models.items():
            for number, model in enumerate(models):
                chunk = f"/model{number}" if self.vpp > 1 else ""
                for name, tensor in model.items():
                    yield f"{self.label(rank)}{chunk}: {name}", tensor


def _rank(numbers: tuple[int, ...], loaded: dict[tuple[int, ...], Any]) -> Rank:
    """Tell which number counts what; a single one may be of stages or of experts."""
    if len(numbers) == 1:
        return Rank(numbers[0], 0, 0)
    if len(numbers) == 3:
        return Rank(*numbers)
    later = [models for key, models in loaded.items() if key[1] > 0]
    experts = any(EMBEDDING in model for models in later for model in models)
    return Rank(numbers[0], 0, numbers[1]) if experts else Rank(numbers[0], numbers[1], 0)


def _load(file: Path) -> list[dict[str, Tensor]]:
    """Map a file: the tensors of each of its pipeline chunks."""
    if not file.is_file():
        hint = "copy the checkpoint again"
        name, where = f"{file.parent.name}/{file.name}", str(file.parent.parent)
        raise InputError(f"{name} is missing", where, hint)
    with open_file(file):
        pass  # it can be read
    try:
        unknown = get_unsafe_globals_in_checkpoint(file)
        with safe_globals([(_Inert, name) for name in unknown]):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        keys = ["model"] if "model" in state else _chunks(state)
        models = [_weights(state[key]) for key in keys]
        if not any(models):
            raise ValueError("it has no weights under `model` or `model0`")
    except Exception as error:  # a pickle, damaged in whatever way
        raise refusal(file, error) from error
    return models


def _chunks(state: dict[str, Any]) -> list[str]:
    keys: list[str] = []
    while f"model{len(keys)}" in state:
        keys.append(f"model{len(keys)}")
    return keys


def _weights(model: dict[str, Any]) -> dict[str, Tensor]:
    found = {
        name: value
        for name, value in model.items()
        if isinstance(value, Tensor) and not name.endswith("_extra_state")
    }
    for name, value in found.items():
        if value.layout is not torch.strided or value.is_quantized:
            raise ValueError(f"{name} is no plain tensor")
    return found
