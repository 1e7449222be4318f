"""Holds published weights against the model that they are said to be of, before anything is done.

Every tensor of the folder must be used by the model's weight map, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from msllm.engine.weights.source import SHOWN, Source, open_weights, shortened
from msllm.errors import MsllmError, Problem
from msllm.models.architecture import Architecture
from msllm.models.families import families
from msllm.models.fused_experts import fused, is_fused
from msllm.models.weight_map import Run, TensorNames, WeightMap, published_shapes, weight_map

READABLE = ("F32", "BF16", "F16")
ROWS = 4096
"""So many rows are compared at a time."""


def check(folder: Path, architecture: Architecture, where: str) -> list[Problem]:
    """List what keeps the folder's weights from being those of the model; empty if they fit."""
    if mapped(architecture) is None:
        return [unknown(architecture, where)]
    try:
        source = open_weights(folder)
    except MsllmError as error:
        return error.problems
    return shortened(list(_differences(source, architecture, where)), where)


def unknown(architecture: Architecture, where: str) -> Problem:
    """Say that nothing is known of the model's weights."""
    kind = architecture.model_type
    return Problem(f"how weights of type {kind} are called is not known yet", where)


def mapped(architecture: Architecture, fused_experts: bool = False) -> WeightMap | None:
    """The map of a model's weights; None where its family's names are not known.

    Args:
        architecture: The model.
        fused_experts: Whether one tensor holds all experts of a layer.
    """
    names = _names(architecture)
    if names is None:
        return None
    weights = weight_map(architecture, names)
    return fused(weights, names) if fused_experts else weights


def has_fused_experts(source: Source, architecture: Architecture) -> bool:
    """Whether one tensor holds all experts of a layer."""
    names = _names(architecture)
    if names is None:
        return False
    return is_fused(weight_map(architecture, names), names, source.tensors.keys())


def _names(architecture: Architecture) -> TensorNames | None:
    family = families().get(architecture.model_type)
    return None if family is None else family.tensors


def _differences(source: Source, architecture: Architecture, where: str) -> Iterator[Problem]:
    weights = mapped(architecture, has_fused_experts(source, architecture))
    assert weights is not None
    wanted = published_shapes(weights)
    prefix = _prefix(source.tensors, wanted)
    if prefix:
        yield Problem(
            f"every tensor's name begins with {prefix}, and the model's names do not",
            where,
            "they are a part of a larger model: save that part alone, under its own names",
        )
        return
    further = _further(architecture, wanted)
    if further and not further & source.tensors.keys():
        yield Problem(
            "the model has multi-token prediction, and the folder has no layers of it",
            where,
            "set num_nextn_predict_layers to 0 in config.json to train without them",
        )
    else:
        further = set()
    for name, shape in wanted.items():
        tensor = source.tensors.get(name)
        if name in further:
            continue
        if tensor is None:
            yield Problem(f"the model has {name}, and the folder does not", where)
        elif tensor.shape != shape:
            theirs, ours = list(tensor.shape), list(shape)
            what = f"{name} is {theirs} in the folder and {ours} in the model"
            rows = architecture.vocab_size == shape[0] and shape[1:] == tensor.shape[1:]
            hint = f"vocab_size in config.json is {shape[0]}" if rows else ""
            yield Problem(what, where, hint)
        elif tensor.dtype not in READABLE:
            hint = f"only {', '.join(READABLE)} are read, and E4M3 with scales"
            yield Problem(f"{name} is stored as {tensor.dtype}", where, hint)
    for name in source.tensors.keys() - wanted.keys():
        if not harmless(name, architecture):
            yield Problem(f"the folder has {name}, and the model does not", where)


def _prefix(found: Iterable[str], wanted: Iterable[str]) -> str:
    """What stands before all names, where nothing else is wrong with them; else nothing."""
    names = set(found)
    first = next(iter(wanted))
    fitting = {name.removesuffix(first) for name in names if name.endswith(f".{first}")}
    return next((p for p in fitting if all(f"{p}{name}" in names for name in wanted)), "")


def _further(architecture: Architecture, wanted: Iterable[str]) -> set[str]:
    """Names of the tensors of multi-token prediction, which some publishers leave out."""
    names = _names(architecture)
    assert names is not None
    first = architecture.num_layers
    layers = range(first, first + architecture.num_nextn_predict_layers)
    prefixes = tuple(names.layer.format(layer=layer) for layer in layers)
    return {name for name in wanted if name.startswith(prefixes)}


def harmless(name: str, architecture: Architecture) -> bool:
    """Whether a tensor says nothing new: rotary tables, a head beside tied embeddings."""
    return name == _tied_head(architecture) or name.endswith(".inv_freq")


def _tied_head(architecture: Architecture) -> str | None:
    """What a head beside tied embeddings would be called."""
    names = _names(architecture)
    tied = names is not None and architecture.tie_word_embeddings
    return f"{names.head}.weight" if names is not None and tied else None


def warnings(source: Source, architecture: Architecture) -> list[str]:
    """List what is odd in weights that fit the model, and is not taken over."""
    names, head = _names(architecture), _tied_head(architecture)
    if names is None or head is None or head not in source.tensors:
        return []
    embedding = f"{names.embedding}.weight"
    if _equal(source, head, embedding):
        return []
    return [f"{head} is not {embedding}, which config.json ties it to: it is left out"]


def _equal(source: Source, one: str, other: str) -> bool:
    shape = source.tensors[one].shape
    if shape != source.tensors[other].shape:
        return False
    blocks = [(first, min(ROWS, shape[0] - first)) for first in range(0, shape[0], ROWS)]
    return all(
        bool((source.rows(Run(one, *block)) == source.rows(Run(other, *block))).all())
        for block in blocks
    )


def not_finite(names: list[str], where: str) -> Problem:
    """Say which parameters have values that are no finite numbers."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return Problem(
        f"not all values are finite numbers in {', '.join(names[:SHOWN])}{more}",
        where,
        "the file may be damaged: download it again",
    )
