"""A run's first weights out of published ones: each rank reads only the rows that it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msllm.engine.megatron import slices
from msllm.engine.weights import matching
from msllm.engine.weights.slice import Slice
from msllm.engine.weights.source import Source, open_weights
from msllm.models.architecture import Architecture
from msllm.models.weight_map import WeightMap


def fill(chunks: list[Any], folder: Path, architecture: Architecture) -> None:
    """Fill this rank's chunks; the folder was checked."""
    source = open_weights(folder)
    weights = matching.mapped(architecture, matching.has_fused_experts(source, architecture))
    assert weights is not None
    for part, held in slices.parts(chunks):
        held.copy_(_read(source, weights, part))


def _read(source: Source, weights: WeightMap, part: Slice) -> Tensor:
    """Read a slice; rows that pad the vocabulary are zero."""
    weight = weights[part.name]
    if part.axis == 1:
        (run,) = weight.runs  # only plain copies are cut along columns
        return torch.cat([source.rows(run, cut) for cut in part.runs], dim=1)
    pieces = []
    for first, count in part.runs:
        held = [source.rows(run) for run in weight.cut(first, count)]
        missing = count - sum(len(piece) for piece in held)
        if missing:
            shape = (missing,) if part.is_vector else (missing, part.width)
            held.append(torch.zeros(shape, dtype=held[0].dtype if held else None))
        pieces += held
    return torch.cat(pieces)
