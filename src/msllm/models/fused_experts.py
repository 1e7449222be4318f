"""The weight map of a model whose experts are published in one tensor of all, not one each.

transformers 5 keeps them so in memory, and what saves its state as it is has these names:
`gate_up_proj` `[experts, 2 * inner, hidden]`, gate rows first, and `down_proj`
`[experts, hidden, inner]`. Which form a folder has is told by its names, never by shapes.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import replace

from msllm.models.weight_map import Run, TensorNames, WeightMap, published_shapes

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_RENAMED = (".block_sparse_moe.", ".mlp.")
"""How Mixtral's layers call their part with experts, and how transformers 5 does."""


def fused(weights: WeightMap, names: TensorNames) -> WeightMap:
    """Map the same parameters to fused experts; a map without experts of their own is given back.

    Args:
        weights: The map of the family's usual names.
        names: Those names.
    """
    if "{expert}" not in names.expert.gate:
        return weights
    shapes = published_shapes(weights)
    pattern = _pattern(names)

    def moved(run: Run) -> Run:
        found = pattern.fullmatch(run.tensor)
        if found is None:
            return replace(run, tensor=_renamed(run.tensor))
        is_down, is_up = found["down"] is not None, found["up"] is not None
        return replace(
            run,
            tensor=_renamed(found["layer"]) + (DOWN if is_down else GATE_UP),
            first=run.first + (shapes[run.tensor][0] if is_up else 0),
            expert=int(found["expert"]),
        )

    return {
        name: replace(weight, runs=tuple(moved(run) for run in weight.runs))
        for name, weight in weights.items()
    }


def is_fused(weights: WeightMap, names: TensorNames, published: Set[str]) -> bool:
    """Whether the published names are those of fused experts."""
    there = {run.tensor for weight in fused(weights, names).values() for run in weight.runs}
    usual = {run.tensor for weight in weights.values() for run in weight.runs}
    return any(name.endswith((GATE_UP, DOWN)) for name in (there - usual) & published)


def _pattern(names: TensorNames) -> re.Pattern[str]:
    """Match an expert's tensor: what stands before its number, the number, and which it is."""
    lead, gate = names.expert.gate.split("{expert}")
    up, down = (name.split("{expert}")[1] for name in (names.expert.up, names.expert.down))
    kinds = (("gate", gate), ("up", up), ("down", down))
    which = "|".join(rf"(?P<{kind}>{re.escape(name)})" for kind, name in kinds)
    return re.compile(rf"(?P<layer>.*{re.escape(lead)})(?P<expert>\d+)(?:{which})\.weight")


def _renamed(name: str) -> str:
    return name.replace(*_RENAMED)
