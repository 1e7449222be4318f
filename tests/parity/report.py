"""Puts together what the ranks of a parity job computed, and holds it against the reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from msllm.engine.weights.matching import mapped
from msllm.engine.weights.transform import scatter
from msllm.models.resolve import resolve_model
from msllm.models.weight_map import published_shapes

SMALLEST = 1e-4
"""Gradients, as a share of the largest one, that are compared absolutely: rounding's own size."""


@dataclass(frozen=True, slots=True)
class Differences:
    """How far a job is from the reference: the largest of each kind."""

    largest_logit: float
    logits: float
    loss: float
    gradients: dict[str, float]
    """Relative to the weight's own gradient, by published name."""


def differences(folder: Path, ranks: Iterable[Path]) -> Differences:
    """Compare the job whose ranks wrote `ranks` with the model in `folder`."""
    found = [torch.load(path, weights_only=True) for path in ranks]
    truth = torch.load(folder / "truth.pt", weights_only=True)
    logits = _logits(found, truth["logits"])
    return Differences(
        largest_logit=float(truth["logits"].abs().max()),
        logits=float((logits - truth["logits"]).abs().max()),
        loss=max(
            abs(rank[kind] - float(truth[kind]))
            for kind in ("loss", "mtp")
            if kind in truth
            for rank in found
        ),
        gradients=_gradients(folder, found),
    )


def _logits(ranks: list[dict[str, Any]], like: torch.Tensor) -> torch.Tensor:
    """Sequences of the data parallel ranks, each of vocabulary parts of the tensor ranks."""
    out = torch.full_like(like, torch.nan)
    for first, step in {rank["sequences"] for rank in ranks}:
        last = {
            rank["tensor_rank"]: rank["logits"]
            for rank in ranks
            if rank["sequences"] == (first, step) and rank["logits"] is not None
        }
        whole = torch.cat([last[index] for index in sorted(last)], dim=-1)
        out[first::step] = whole[..., : like.size(-1)]
    return out


def _gradients(folder: Path, ranks: list[dict[str, Any]]) -> dict[str, float]:
    expected = _load(folder / "gradients")
    largest = max(float(value.norm()) for value in expected.values())
    found = _published(folder, _whole(ranks))
    return {
        name: float((value - expected[name]).norm())
        / max(float(expected[name].norm()), SMALLEST * largest)
        for name, value in found.items()
    }


def _load(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def _whole(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Whole parameters' gradients out of the slices of all ranks."""
    slices: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    axes = {}
    for rank in ranks:
        for name, axis, runs, gradient in rank["gradients"]:
            axes[name] = axis
            pieces = gradient.split([count for _, count in runs], dim=axis)
            slices.setdefault(name, {}).update(zip(runs, pieces, strict=True))
    return {
        name: torch.cat([held[run] for run in sorted(held)], dim=axes[name])
        for name, held in slices.items()
    }


def _published(folder: Path, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = mapped(resolve_model(str(folder)).architecture)
    assert weights is not None
    assert gradients.keys() == weights.keys()
    out = {name: torch.full(shape, torch.nan) for name, shape in published_shapes(weights).items()}
    for name, weight in weights.items():
        scatter(weight, gradients[name], out.__getitem__)
    return {name: value for name, value in out.items() if "e_score_correction" not in name}
