"""Muon by Megatron-core's own optimizer, with a stand-in for the package it imports.

`emerging_optimizers` needs Python 3.12, so what is tested is msllm's wiring: which parameters it
updates, that layouts agree, and that checkpoints continue. The truth is torch's own Muon.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.engine.megatron.conftest import HERE, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("megatron-jobs")]

STEPS, SAVED_AT = 4, 2
QWEN3, MOE, TIED = {"family": "qwen3"}, {"family": "qwen3_moe"}, {"family": "qwen2"}

STRAIGHT: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (1, QWEN3 | {"save": True}),
    "tied": (1, TIED),
    "moe": (1, MOE | {"save": True}),
    "bf16": (1, QWEN3 | {"dtype": "bf16", "save": True}),
    "first two steps": (1, QWEN3 | {"steps": 2, "moves": True}),
    "dense tp2": (2, QWEN3 | {"layout": {"tp": 2}, "save": True}),
    "dense dp2": (2, QWEN3),
    "tied pp2": (2, TIED | {"layout": {"pp": 2}}),
    "moe tp2": (2, MOE | {"layout": {"tp": 2}}),
    "moe ep2": (2, MOE | {"layout": {"ep": 2}}),
}
CONTINUED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense at one": ("dense", 1, QWEN3),
    "moe at one": ("moe", 1, MOE),
    "bf16 at one": ("bf16", 1, QWEN3 | {"dtype": "bf16"}),
    "dense tp2 at one": ("dense tp2", 1, QWEN3),
    "dense tp2 at tp2": ("dense tp2", 2, QWEN3 | {"layout": {"tp": 2}}),
}
OTHER_LAYOUTS = [name for name, (world, _) in STRAIGHT.items() if world > 1]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("muon")
    reports: dict[str, Any] = {}
    for world in (2, 1):  # one process continues what two have saved
        cases = [
            {"name": name, "steps": STEPS} | case | _folder(folder, name, case)
            for name, (size, case) in STRAIGHT.items()
            if size == world
        ]
        cases += [
            {"name": name, "steps": STEPS - SAVED_AT, "load": str(folder / saved)} | case
            for name, (saved, size, case) in CONTINUED.items()
            if size == world
        ]
        reports |= _job(folder, world, cases)
    return reports


def _folder(folder: Path, name: str, case: dict[str, Any]) -> dict[str, str]:
    return {"save": str(folder / name)} if case.get("save") else {}


def _job(folder: Path, world: int, cases: list[dict[str, Any]]) -> dict[str, Any]:
    inputs, out = folder / f"{world}.json", folder / f"{world}.out"
    inputs.write_text(json.dumps(cases))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE / "muon_package"), prepend=os.pathsep)
        run_ranks(world, HERE / "muon_cases.py", str(inputs), str(out))
    return json.loads(out.read_text())


def test_matrices_move_as_by_torchs_muon_and_the_rest_as_by_adamw(found):
    moves = found["first two steps"]["moves"]
    adamw = ("embedding", "output_layer", "layernorm")
    for name, difference in moves.items():
        # torch iterates in bfloat16
        limit = 1e-4 if any(part in name for part in adamw) else 0.03
        assert difference < limit, name


def test_embeddings_and_norms_are_adamws(found):
    kinds = found["moe"]["kinds"]
    assert set(kinds) == {"TensorParallelMuon", "AdamW"}
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} < set(kinds["AdamW"])
    assert all(
        "norm" in name or name.startswith(("embedding.", "output_layer."))
        for name in kinds["AdamW"]
    )
    matrices = kinds["TensorParallelMuon"]
    assert all("decoder.layers." in name and "norm" not in name for name in matrices)
    # an expert is a matrix of its own: one made of all experts would be orthogonalized as one
    assert sum("experts" in name for name in matrices) == 5 * 4 * 2


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_layouts_agree(found, name):
    one, many = found[name.split()[0]], found[name]
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert many["norms"][0] == pytest.approx(one["norms"][0], rel=1e-4)


@pytest.mark.parametrize("name", CONTINUED)
def test_a_checkpoint_continues_the_curve(found, name):
    straight = found[CONTINUED[name][0]]["losses"][SAVED_AT:]
    same_layout = name != "dense tp2 at one"
    assert found[name]["losses"] == (straight if same_layout else pytest.approx(straight, rel=1e-5))


def test_it_learns(found):
    for name in ("dense", "moe", "bf16"):
        losses = found[name]["losses"]
        assert len(set(losses)) == STEPS
