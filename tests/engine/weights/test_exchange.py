"""Converted checkpoints are Megatron's own: its reader loads them, and its saves export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from msllm.engine.weights.to_hf import mcore_to_hf
from msllm.engine.weights.to_mcore import hf_to_mcore
from tests.engine.megatron.conftest import run_ranks
from tests.engine.weights.test_convert import CASES, weights

LAYOUTS = {
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "tp2-ep2": (4, {"tp": 2, "ep": 2}),
}


def _chosen() -> list[str]:
    """One case of each type of model, and those whose parameters differ from the first's."""
    first = {case.model_type: name for name, case in reversed(CASES.items())}
    return [
        n for n in CASES if n in first.values() or any(w in n for w in ("bias", "tied", "further"))
    ]


NAMES = {
    layout: [name for name in _chosen() if CASES[name].has_experts or "ep" not in sizes]
    for layout, (_, sizes) in LAYOUTS.items()
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in _chosen():
        CASES[name].write(folder / name)
        hf_to_mcore(folder / name, folder / name / "mcore")
    return folder


@pytest.fixture(scope="module")
def exchanged(models, tmp_path_factory):
    out = tmp_path_factory.mktemp("exchanged")
    return {layout: exchange(models, out / layout, layout) for layout in LAYOUTS}


def exchange(models: Path, out: Path, layout: str) -> Path:
    world, sizes = LAYOUTS[layout]
    out.mkdir()
    script = Path(__file__).with_name("exchange_case.py")
    run_ranks(world, script, str(models), str(out), json.dumps(sizes), *NAMES[layout])
    return out


@pytest.mark.parametrize(
    ("layout", "name"), [(x, name) for x, names in NAMES.items() for name in names]
)
def test_megatron_reads_what_is_converted_and_what_it_saves_is_exported(
    layout, name, models, exchanged, tmp_path
):
    world, _ = LAYOUTS[layout]
    for rank in range(world):
        assert json.loads((exchanged[layout] / f"{name}.{rank}.json").read_text()) == []
    mcore_to_hf(exchanged[layout] / name, tmp_path / "back", model=str(models / name))
    before, after = weights(models / name), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert [k for k in before if not torch.equal(before[k], after[k])] == []
