"""The map between published tensors and Megatron's parameters, as integers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msllm.models.catalog import catalog
from msllm.models.counts import parameters
from msllm.models.families import families
from msllm.models.resolve import resolve_model
from msllm.models.weight_map import Run, Weight, published_shapes, weight_map

MAPPED = [
    card.name
    for card in catalog().models
    if card.config
    and (family := families().get(str(card.config.get("model_type")))) is not None
    and family.tensors is not None
]


def small(name: str):
    """A catalog model with fewer layers and experts, for speed; the rest is as published."""
    architecture = resolve_model(name).architecture
    moe = architecture.moe and replace(architecture.moe, num_experts=3, num_experts_per_tok=1)
    return replace(architecture, num_layers=2, moe=moe)


def mapped(architecture):
    family = families()[architecture.model_type]
    assert family.tensors is not None
    return weight_map(architecture, family.tensors)


def test_there_are_many():
    assert len(MAPPED) > 40


@pytest.mark.parametrize("name", MAPPED)
def test_every_row_is_used_exactly_once(name):
    weights = mapped(small(name))
    rows = Counter()
    for run in [r for one in weights.values() for w in (one, *one.duplicates()) for r in w.runs]:
        end = run.first + run.count * run.step
        rows.update((run.tensor, run.expert, row) for row in range(run.first, end, run.step))
    assert set(rows.values()) == {1}
    in_stacks = {tensor for tensor, expert, _ in rows if expert is not None}
    transposed = {
        run.tensor for weight in weights.values() for run in weight.runs if run.transposed
    }
    there = 0
    for tensor, (first, *more) in published_shapes(weights).items():
        sizes = more if tensor in in_stacks else (first, *more)
        there += sizes[-1 if tensor in transposed else 0] * (first if tensor in in_stacks else 1)
    assert len(rows) == there


@pytest.mark.parametrize("name", MAPPED)
def test_there_are_as_many_parameters_as_counted(name):
    """Balancing biases, which no gradient trains, and second copies are counted nowhere."""
    architecture = small(name)
    weights = mapped(architecture)
    uncounted = {
        tensor
        for ours, weight in weights.items()
        for tensor in (
            *weight.copies,
            *(run.tensor for run in weight.runs if ours.endswith("expert_bias")),
        )
    }
    found = sum(
        math.prod(shape)
        for tensor, shape in published_shapes(weights).items()
        if tensor not in uncounted
    )
    counted = parameters(architecture)
    assert found == counted.total + counted.mtp


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    first=st.integers(0, 30),
    count=st.integers(1, 30),
)
def test_a_cut_is_those_rows_of_the_whole(counts, first, count):
    weight = Weight(tuple(Run(f"t{i % 2}", 7 * i, n) for i, n in enumerate(counts)), None)

    def rows(runs):
        return [(run.tensor, run.first + i) for run in runs for i in range(run.count)]

    assert rows(weight.cut(first, count)) == rows(weight.runs)[first : first + count]
