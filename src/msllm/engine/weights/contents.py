"""What a folder of weights holds: its format, its model, its tensors; read from headers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from msllm.engine.weights import views
from msllm.engine.weights.folder_kind import Folder, Kind, find
from msllm.engine.weights.pickled import PickledWeights
from msllm.engine.weights.published import TORCH_NAMES, PublishedWeights
from msllm.engine.weights.rank_files import RankFiles
from msllm.engine.weights.torch_dist import StoredTensor, StoredWeights
from msllm.models.architecture import Architecture
from msllm.models.catalog import catalog


@dataclass(frozen=True, slots=True)
class Listed:
    """A tensor: its name, shape, type as torch calls it, and bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a folder.

    Attributes:
        folder: What it is.
        architecture: The model's, where a config is with it.
        names: Models of the catalog that have this shape.
        layout: Parallel sizes it was saved with, where known.
        tensors: Those of the model, in the order in which they are stored.
        optimizer: Those of the optimizer.
    """

    folder: Folder
    architecture: Architecture | None
    names: tuple[str, ...]
    layout: dict[str, int] | None
    tensors: tuple[Listed, ...]
    optimizer: tuple[Listed, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of the model's tensors."""
        return sum(tensor.bytes for tensor in self.tensors)


def by_dtype(tensors: tuple[Listed, ...]) -> dict[str, int]:
    """Bytes of each type of numbers, the most first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.bytes
    return dict(sizes.most_common())


def inspect(folder: Path) -> Contents:
    """Look into a folder of weights, a checkpoint, or a run's newest checkpoint.

    Raises:
        InputError: It is none of these, or damaged.
    """
    found = find(folder)
    architecture = views.architecture_of(found)
    names = () if architecture is None else _names(architecture)
    manifest = found.manifest
    layout = dict(manifest.layout) if manifest is not None and manifest.layout else None
    if found.kind is Kind.RANKS:
        files = RankFiles(found.path)
        listed = tuple(
            _listed(name, StoredTensor(tuple(tensor.shape), tensor.dtype))
            for name, tensor in files.tensors()
        )
        return Contents(found, architecture, names, files.layout(), listed)
    if found.kind is Kind.TORCH_DIST:
        stored = StoredWeights(found.path)
        tensors, optimizer = (
            tuple(_listed(name, tensor) for name, tensor in group.items())
            for group in (stored.tensors, stored.optimizer)
        )
        return Contents(found, architecture, names, layout, tensors, optimizer)
    return Contents(found, architecture, names, None, tuple(_published(found)))


def _published(folder: Folder) -> Iterator[Listed]:
    is_pickled = folder.kind is Kind.PICKLED
    held = PickledWeights(folder.path) if is_pickled else PublishedWeights(folder.path)
    for name, entry in held.entries.items():
        dtype = TORCH_NAMES.get(entry.dtype, entry.dtype.lower())
        yield Listed(name, entry.shape, dtype, entry.size)


def _listed(name: str, tensor: StoredTensor) -> Listed:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Listed(name, tensor.shape, dtype, math.prod(tensor.shape) * tensor.dtype.itemsize)


def _names(architecture: Architecture) -> tuple[str, ...]:
    """Models of the catalog whose shape this is."""
    shape = _shape(architecture)
    return tuple(
        card.name
        for card in catalog().models
        if card.known_architecture is not None and _shape(card.known_architecture) == shape
    )


def _shape(architecture: Architecture) -> Architecture:
    """The architecture without what is no matter of shape and often differs between kin."""
    moe = architecture.moe and replace(architecture.moe, aux_loss_coef=0.0)
    return replace(architecture, max_position_embeddings=None, extra=(), moe=moe)
