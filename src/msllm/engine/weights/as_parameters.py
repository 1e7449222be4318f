"""One view on weights of any format: whole tensors by name, read when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Protocol

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from msllm.engine.weights import matching, recorded_model, sidecar, transform
from msllm.engine.weights.folder_kind import Folder, Kind
from msllm.engine.weights.published import TORCH_NAMES, PublishedWeights
from msllm.engine.weights.rank_files import RankFiles
from msllm.engine.weights.rank_weights import RankWeights
from msllm.engine.weights.source import Source, open_weights
from msllm.engine.weights.stored import places
from msllm.engine.weights.torch_dist import StoredTensor, StoredWeights, Written
from msllm.errors import InputError, Problem
from msllm.models.architecture import Architecture
from msllm.models.hf_config import architecture_from_config, read_config
from msllm.models.weight_map import WeightMap, published_shapes


class Tensors(Protocol):
    """Tensors by name."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Their shapes and types."""

    def tensor(self, name: str) -> Tensor:
        """Read one, whole."""


def published(folder: Path) -> PublishedWeights:
    """Open a folder of Hugging Face weights.

    Raises:
        InputError: They are damaged, or of a type that torch does not have.
    """
    found = PublishedWeights(folder)
    types = {entry.dtype: name for name, entry in found.entries.items()}
    unknown = [
        Problem(f"{name} is stored as {dtype}, which is not read", str(folder))
        for dtype, name in types.items()
        if dtype not in TORCH_NAMES
    ]
    if unknown:
        raise InputError(unknown)
    return found


def config_folder(folder: Folder) -> Path | None:
    """Where the config of a folder's model is; None where it has none."""
    if (folder.path / "config.json").is_file():
        return folder.path
    return sidecar.kept(folder.path) or sidecar.kept(folder.asked.expanduser())


def architecture_of(folder: Folder) -> Architecture | None:
    """The architecture that a folder says it is of; None where it says nothing."""
    beside = config_folder(folder)
    if beside is not None:
        return architecture_from_config(read_config(beside))
    if folder.manifest is None or not folder.manifest.architecture:
        return None
    try:
        return TypeAdapter(Architecture).validate_python(folder.manifest.architecture)
    except ValidationError:  # written by a version with other fields
        return None


def as_parameters(folder: Folder, architecture: Architecture) -> Tensors:
    """View a folder's weights as Megatron's parameters, by global name.

    Raises:
        InputError: The weights are damaged, or not known to be of such a model.
    """
    weights = matching.mapped(architecture)
    if weights is None:
        raise InputError([matching.unknown(architecture, str(folder.asked))])
    if folder.kind.is_published:
        return PublishedParameters(open_weights(folder.path), architecture)
    if folder.kind is Kind.TORCH_DIST:
        other = list(recorded_model.differences(folder.path, architecture, str(folder.asked)))
        if other:
            raise InputError(other)
        return StoredParameters(StoredWeights(folder.path), weights, architecture)
    return RankWeights(RankFiles(folder.path), weights, architecture)


class AsPublished:
    """Published weights by their own names."""

    def __init__(self, folder: Path):
        self._source = open_weights(folder)
        self.tensors = {
            name: StoredTensor(tensor.shape, self._source.dtype(name))
            for name, tensor in self._source.tensors.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Read one, whole."""
        return self._source.tensor(name)


class PublishedParameters:
    """Published weights as parameters; tensors that are in none go by their own names."""

    def __init__(self, source: Source, architecture: Architecture):
        weights = matching.mapped(architecture, matching.has_fused_experts(source, architecture))
        assert weights is not None
        self._source, self._weights = source, weights
        self.tensors: dict[str, StoredTensor] = {}
        used = set()
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        wanted = published_shapes(weights)
        for name, weight in weights.items():
            tensors = {run.tensor for run in weight.runs} | set(weight.copies)
            if all(shapes.get(tensor) == wanted[tensor] for tensor in tensors):
                types = [source.dtype(run.tensor) for run in weight.runs]
                self.tensors[name] = StoredTensor(weight.shape, _widest(types))
                used |= tensors
        for name in shapes.keys() - used:  # told instead of the parameters that need them
            if not matching.harmless(name, architecture):
                self.tensors[name] = StoredTensor(shapes[name], source.dtype(name))

    def tensor(self, name: str) -> Tensor:
        """Put one together."""
        if name not in self._weights:
            return self._source.tensor(name)
        dtype = self.tensors[name].dtype
        return transform.gather(self._weights[name], lambda run: self._source.rows(run).to(dtype))


class StoredParameters:
    """A `torch_dist` checkpoint's parameters; tensors that are none go by their own names."""

    def __init__(self, stored: StoredWeights, weights: WeightMap, architecture: Architecture):
        self._stored = stored
        faults = list(stored.faults())
        if faults:
            raise InputError(faults)
        self._last: dict[Written, Tensor] = {}
        self._pieces: dict[str, list[Written]] = {}
        self._lead: dict[str, tuple[int, ...]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        names: dict[tuple[str, tuple[int, ...]], str] = {}
        for name, place in places(weights, architecture).items():
            held = stored.tensors.get(place.key)
            if held is None or held.shape[: len(place.sizes)] != place.sizes:
                continue  # told by the tensor that is there instead
            shape = _unpadded(held.shape[len(place.sizes) :], weights[name].shape)
            self.tensors[name] = StoredTensor(shape, held.dtype)
            self._lead[name] = place.index
            names[place.key, place.index] = name
        known = {key: len(index) for key, index in names}
        for key in stored.tensors.keys() - known.keys():
            self.tensors[key], self._lead[key] = stored.tensors[key], ()
        for piece in stored.pieces():
            for index in _leads(piece, known.get(piece.piece.key, 0)):
                found = names.get((piece.piece.key, index), piece.piece.key)
                self._pieces.setdefault(found, []).append(piece)

    def tensor(self, name: str) -> Tensor:
        """Read one, without rows that pad the vocabulary."""
        held, lead = self.tensors[name], self._lead[name]
        out = torch.empty(held.shape, dtype=held.dtype)
        # pieces of several experts are kept for the next of them
        pieces = {
            piece: self._last[piece] if piece in self._last else self._stored.read(piece)
            for piece in self._pieces[name]
        }
        self._last = {p: v for p, v in pieces.items() if math.prod(p.piece.sizes[: len(lead)]) > 1}
        for piece, values in pieces.items():
            offsets = piece.piece.offsets
            block = values[tuple(i - o for i, o in zip(lead, offsets, strict=False))]
            target = out
            for axis, first in enumerate(offsets[len(lead) :]):
                count = max(0, min(block.size(axis), held.shape[axis] - first))
                target = target.narrow(axis, min(first, held.shape[axis]), count)
                block = block.narrow(axis, 0, count)
            target.copy_(block)
        return out


def _leads(piece: Written, axes: int) -> Iterator[tuple[int, ...]]:
    """Layers, or experts, of which a piece has something."""
    box = zip(piece.piece.offsets[:axes], piece.piece.sizes[:axes], strict=True)
    return product(*(range(first, first + count) for first, count in box))


def _unpadded(found: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without rows that pad the vocabulary."""
    padded = len(found) == len(wanted) == 2 and found[1] == wanted[1] and found[0] > wanted[0]
    return wanted if padded else found


def _widest(types: list[torch.dtype]) -> torch.dtype:
    found = types[0]
    for other in types[1:]:
        found = torch.promote_types(found, other)
    return found
