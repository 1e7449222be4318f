"""A run's first weights out of published ones: each rank reads only the rows that it holds.

`check` holds the folder's headers against the model before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msllm.engine.weights.published import PublishedWeights
from msllm.errors import MsllmError, Problem
from msllm.models.architecture import Architecture
from msllm.models.families import families
from msllm.models.weight_map import WeightMap, published_shapes, weight_map

if TYPE_CHECKING:
    from torch import Tensor

    from msllm.engine.megatron.slices import Slice

READABLE = ("F32", "BF16", "F16")
SHOWN = 6


def check(folder: Path, architecture: Architecture) -> list[Problem]:
    """List what keeps the folder's weights from being those of the model; empty if they fit."""
    where = f"--init-from {folder}"
    weights = mapped(architecture)
    if weights is None:
        return [
            Problem(
                f"how weights of type {architecture.model_type} are called is not known yet", where
            )
        ]
    try:
        published = PublishedWeights(folder.expanduser())
    except MsllmError as error:
        return error.problems
    found = list(_differences(published, weights, architecture, where))
    if len(found) > SHOWN:
        found[SHOWN:] = [Problem(f"and {len(found) - SHOWN} more of that kind", where)]
    return found


def mapped(architecture: Architecture) -> WeightMap | None:
    """The map of a model's weights; None where its family's names are not known."""
    family = families().get(architecture.model_type)
    if family is None or family.tensors is None:
        return None
    return weight_map(architecture, family.tensors)


def _differences(
    published: PublishedWeights, weights: WeightMap, architecture: Architecture, where: str
) -> Iterator[Problem]:
    wanted = published_shapes(weights)
    for name, shape in wanted.items():
        entry = published.entries.get(name)
        if entry is None:
            yield Problem(f"the model has {name}, and the folder does not", where)
        elif entry.shape != shape:
            theirs, ours = list(entry.shape), list(shape)
            yield Problem(f"{name} is {theirs} in the folder and {ours} in the model", where)
        elif entry.dtype not in READABLE:
            hint = f"only {', '.join(READABLE)} are read"
            yield Problem(f"{name} is stored as {entry.dtype}", where, hint)
    for name in published.entries.keys() - wanted.keys():
        if not _harmless(name, architecture):
            yield Problem(f"the folder has {name}, and the model does not", where)


def _harmless(name: str, architecture: Architecture) -> bool:
    """Whether a tensor says nothing new: rotary tables, a head beside tied embeddings."""
    names = families()[architecture.model_type].tensors
    assert names is not None
    tied = architecture.tie_word_embeddings and name == f"{names.head}.weight"
    return tied or name.endswith(".inv_freq")


def fill(chunks: list[Any], folder: Path, architecture: Architecture) -> None:
    """Fill this rank's chunks; the folder was checked."""
    from msllm.engine.megatron import slices

    weights, published = mapped(architecture), PublishedWeights(folder.expanduser())
    assert weights is not None
    for part, held in slices.parts(chunks):
        held.copy_(_read(published, weights, part))


def _read(published: PublishedWeights, weights: WeightMap, part: Slice) -> Tensor:
    """Read a slice; rows that pad the vocabulary are zero."""
    import torch

    weight = weights[part.name]
    if part.axis == 1:
        (run,) = weight.runs  # only plain copies are cut along columns
        return torch.cat([published.rows(run, cut) for cut in part.runs], dim=1)
    pieces = []
    for first, count in part.runs:
        held = [published.rows(run) for run in weight.cut(first, count)]
        missing = count - sum(len(piece) for piece in held)
        if missing:
            shape = (missing,) if part.is_vector else (missing, part.width)
            held.append(torch.zeros(shape, dtype=held[0].dtype if held else None))
        pieces += held
    return torch.cat(pieces)
