"""Initial weights depend only on the seed and on what they are, never on the layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.megatron.cases import BASE
from tests.engine.megatron.conftest import HERE, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("megatron-jobs")]

VOCABULARY, LAYERS = BASE["vocab_size"], BASE["num_layers"]
SEPARATE = {"grouped_gemm": False}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3": (1, {}),
    "qwen2": (1, {}),
    "qwen3_moe": (1, {}),
    "qwen3_moe separate": (1, {"layout": SEPARATE}),
    "qwen3 wide": (1, {"train": {"init_std": 0.1}}),
    "qwen3 other-seed": (1, {"seed": 7}),
    "qwen3 tp2": (2, {"layout": {"tp": 2}}),
    "qwen3 pp2-vpp2": (2, {"layout": {"pp": 2, "vpp": 2}}),
    "qwen2 pp2": (2, {"layout": {"pp": 2}}),
    "qwen3_moe ep2": (2, {"layout": {"ep": 2}}),
    "qwen3_moe tp2": (2, {"layout": {"tp": 2}}),
    "qwen3_moe etp2": (2, {"layout": {"tp": 2, "etp": 2, "dispatcher": "allgather"}}),
    "qwen3_moe ep2-separate": (2, {"layout": {"ep": 2} | SEPARATE}),
    "qwen3 tp2-pp2": (4, {"layout": {"tp": 2, "pp": 2}}),
    "qwen2 tp2-pp2": (4, {"layout": {"tp": 2, "pp": 2}}),
    "qwen3_moe tp2-ep2-pp2": (4, {"layout": {"tp": 2, "ep": 2, "pp": 2}}),
}
"""Family and what is special -> world size and settings."""

SAME = [name for name in CASES if " " in name and name.split()[1] not in ("wide", "other-seed")]
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
TO_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight")


class Weights:
    """Global tensors of each case, and what else its job has to say."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.reports: dict[str, Any] = {}

    def __getitem__(self, name: str) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / f"{name}.pt")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    made = Weights(tmp_path_factory.mktemp("initial"))
    for world in (1, 2, 4):
        cases = [
            {"name": name, "family": name.split()[0]} | case
            for name, (size, case) in CASES.items()
            if size == world
        ]
        inputs, out = made.folder / f"{world}.json", made.folder / f"{world}.out"
        inputs.write_text(json.dumps(cases))
        run_ranks(world, HERE / "initialize_cases.py", str(inputs), str(out), str(made.folder))
        made.reports |= json.loads(out.read_text())
    return made


@pytest.mark.parametrize("name", SAME)
def test_every_layout_starts_from_the_same_numbers(weights, name):
    one, many = weights[name.split()[0]], weights[name]
    assert many.keys() == one.keys()
    for key, values in one.items():
        ours = many[key][:VOCABULARY] if key in TABLES else many[key]
        assert torch.equal(ours, values), key


def test_a_part_of_a_matrix_is_drawn_as_in_the_whole(weights):
    """Any rows or columns, in any order: a property, see `initialize_cases`."""
    assert weights.reports["draw"] == {"error": ""}


@pytest.mark.parametrize("name", ["qwen3 tp2", "qwen2 tp2-pp2"])
def test_rows_that_pad_the_vocabulary_are_zero(weights, name):
    tables = [values for key, values in weights[name].items() if key in TABLES]
    for table in tables:
        assert len(table) == VOCABULARY + 1
        assert not table[VOCABULARY:].any()
        assert table[:VOCABULARY].abs().sum(1).min() > 0


@pytest.mark.parametrize("name", ["qwen2 pp2", "qwen2 tp2-pp2"])
def test_both_ends_of_a_pipeline_hold_the_tied_table(weights, name):
    sums = weights.reports[name]["tied"]
    half = len(sums) // 2
    assert half == CASES[name][1]["layout"].get("tp", 1)
    assert sums[:half] == sums[half:]


@pytest.mark.parametrize(
    ("name", "std"), [("qwen3", 0.02), ("qwen3_moe", 0.02), ("qwen3 wide", 0.1)]
)
def test_deviation_is_as_asked_and_less_where_the_residual_is_written(weights, name, std):
    for key, values in weights[name].items():
        if "norm" in key:
            assert (values == 1).all(), key
            continue
        scaled = std / math.sqrt(2 * LAYERS) if key.endswith(TO_RESIDUAL) else std
        # five standard errors of a sample's deviation and mean
        assert float(values.std()) == pytest.approx(
            scaled, abs=5 * scaled / math.sqrt(2 * values.numel())
        ), key
        assert abs(float(values.mean())) < 5 * scaled / math.sqrt(values.numel()), key


def test_biases_start_at_zero(weights):
    biases = [values for key, values in weights["qwen2"].items() if key.endswith("bias")]
    assert biases
    assert not any(values.any() for values in biases)


def test_another_seed_gives_other_weights(weights):
    one, other = weights["qwen3"], weights["qwen3 other-seed"]
    for key, values in one.items():
        if "norm" not in key:
            assert (values != other[key]).float().mean() > 0.99, key


def test_no_two_matrices_are_alike(weights):
    """Of layers, of experts, and of the two halves of a gated MLP."""
    seen: dict[float, str] = {}
    for key, values in weights["qwen3_moe"].items():
        if "norm" in key:
            continue
        rows = values.reshape(-1, values.size(-1))
        for row in rows:
            number = float(row[:4].double().sum())
            assert number not in seen, f"{key} repeats {seen.get(number)}"
            seen[number] = key
