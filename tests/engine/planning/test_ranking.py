"""The search of layouts, with traces made up from formulas."""

from __future__ import annotations

from collections import Counter

import pytest

from msllm.config import RunConfig
from msllm.engine.layout import Layout
from msllm.engine.planning import memory, search
from msllm.engine.planning.folding import Fold, fold
from msllm.engine.planning.ranking import rank
from msllm.engine.planning.records import ChunkTrace, Record, StageTrace
from msllm.errors import InputError
from msllm.models.device_models import device_model
from msllm.models.resolve import resolve_model

DEVICE = device_model("Ascend910B2")


def run(model: str, nodes: int, **train: object) -> RunConfig:
    content = {"model": model, "launch": {"nodes": nodes, "npus": 8}, "train": train}
    return RunConfig.model_validate(content)


def made_up(run: RunConfig, stage: int) -> StageTrace:
    """A trace whose only work is the share of the layers."""
    architecture = resolve_model(run.model).architecture
    layout = Layout.from_world(run.layout, run.launch.world_size)
    again = 4 if run.train.recompute == "full" else 3
    layers = layout.stages(architecture.num_layers)[stage]
    flops = again * sum(map(len, layers)) * 10**13 // layout.tp
    work = Counter({("matmul", flops, 0): 1})
    chunks = [ChunkTrace(Record(work), Record()) for _ in layers]
    static = dict(memory._stage(architecture, layout, run, "npu", stage).items)
    return StageTrace(stage, static, 0, 0, chunks, Record(), Record())


def ranking(asked: RunConfig, recipe: RunConfig | None = None, recomputes=("none", "full")):
    architecture = resolve_model(asked.model).architecture
    return rank(asked, architecture, DEVICE, recomputes, recipe, made_up)


def test_the_best_comes_first_and_the_recipe_is_shown():
    asked = run("qwen3-8b", 1, global_batch=64)
    recipe = search.with_sizes(asked, "full", tp=8)
    found = ranking(asked, recipe)
    speeds = [each.plan.tokens_per_second for each in found.best]
    assert speeds == sorted(speeds, reverse=True)
    assert len(found.best) == 5
    assert [each.name for each in found.best if each.recipe] == ["tp 8, full recompute"]
    assert all(each.plan.fits for each in found.best)


def test_a_recipe_that_is_not_legal_here_says_why():
    asked = run("qwen3-8b", 1)
    found = ranking(asked, search.with_sizes(asked, "none", tp=8, pp=2))
    assert "does not divide the 8 processes" in found.recipe_problem


def test_each_neighbour_that_lost_has_a_reason():
    found = ranking(run("qwen3-8b", 1, global_batch=64), recomputes=("none",))
    reasons = dict(found.rejected)
    assert "no experts" in reasons["ep 2"]
    assert "recomputes" in reasons["recompute full"]
    assert len(reasons) >= 5


def test_every_layout_is_legal_and_tried_once():
    asked = run("qwen3-30b-a3b", 2, global_batch=64)
    architecture = resolve_model("qwen3-30b-a3b").architecture
    found = list(search.candidates(asked, architecture, DEVICE, ("none",)))
    layouts = [each.layout for each in found]
    assert len(set(layouts)) == len(layouts) > 30
    for layout in layouts:
        assert not layout.problems(architecture)
        assert layout.world_size == 16
        assert layout.tp <= 8


def test_a_model_larger_than_the_cluster_says_what_it_would_take():
    with pytest.raises(InputError) as caught:
        ranking(run("deepseek-v3", 1))
    (problem,) = caught.value.problems
    assert "does not fit 8 x Ascend910B2" in problem.problem
    needed = int(problem.hint.split("about ")[1].split(" of")[0])
    architecture = resolve_model("deepseek-v3").architecture
    for nodes, fits in ((needed // 8, True), (needed // 16, False)):
        legal = search.candidates(run("deepseek-v3", nodes), architecture, DEVICE, ("full",))
        assert any(each.total <= DEVICE.memory for each in legal) == fits


@pytest.mark.parametrize(
    ("kinds", "block", "found"),
    [
        ("a" * 12, 1, Fold(0, 1, 12)),
        ("ab" * 8, 1, Fold(0, 2, 8)),
        ("ab" * 8 + "a", 1, Fold(1, 2, 8)),
        ("dd" + "m" * 12, 1, Fold(2, 1, 12)),
        ("a" * 12, 2, Fold(0, 2, 6)),
        ("a" * 5, 1, None),
        ("abcdefghijkl", 1, None),
    ],
)
def test_repetitions_are_found(kinds, block, found):
    assert fold(kinds, block) == found
