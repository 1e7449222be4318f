"""Holds published weights against the model that they are said to be of, before anything is done.

Every tensor of the folder must be used by the model's weight map, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msllm.engine.weights.published import PublishedWeights
from msllm.errors import MsllmError, Problem
from msllm.models.architecture import Architecture
from msllm.models.families import families
from msllm.models.weight_map import WeightMap, published_shapes, weight_map

READABLE = ("F32", "BF16", "F16")
SHOWN = 6


def check(folder: Path, architecture: Architecture, where: str) -> list[Problem]:
    """List what keeps the folder's weights from being those of the model; empty if they fit."""
    weights = mapped(architecture)
    if weights is None:
        return [unknown(architecture, where)]
    try:
        published = PublishedWeights(folder.expanduser())
    except MsllmError as error:
        return error.problems
    return first(list(_differences(published, weights, architecture, where)), where)


def first(found: list[Problem], where: str) -> list[Problem]:
    """The first of many problems, and how many more there are."""
    if len(found) > SHOWN:
        found[SHOWN:] = [Problem(f"and {len(found) - SHOWN} more of that kind", where)]
    return found


def unknown(architecture: Architecture, where: str) -> Problem:
    """Say that nothing is known of the model's weights."""
    kind = architecture.model_type
    return Problem(f"how weights of type {kind} are called is not known yet", where)


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
        if not harmless(name, architecture):
            yield Problem(f"the folder has {name}, and the model does not", where)


def harmless(name: str, architecture: Architecture) -> bool:
    """Whether a tensor says nothing new: rotary tables, a head beside tied embeddings."""
    names = families()[architecture.model_type].tensors
    assert names is not None
    tied = architecture.tie_word_embeddings and name == f"{names.head}.weight"
    return tied or name.endswith(".inv_freq")


def not_finite(names: list[str], where: str) -> Problem:
    """Say which parameters have values that are no finite numbers."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return Problem(
        f"not all values are finite numbers in {', '.join(names[:SHOWN])}{more}",
        where,
        "the file may be damaged: download it again",
    )
