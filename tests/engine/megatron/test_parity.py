"""The trained families compute what transformers' models compute, and have their gradients."""

from __future__ import annotations

import json

import pytest

from tests.engine.megatron.conftest import HERE, run_ranks
from tests.engine.megatron.parity_case import CASES

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("megatron-parity")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    out = tmp_path_factory.mktemp("parity") / "found.json"
    run_ranks(1, HERE / "parity_case.py", str(out))
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(found, name):
    case = found[name]
    assert case["largest"] > 0.5  # else equality would say little
    assert case["logits"] < 1e-4
    assert case["loss"] < 1e-5
    assert case["gradients"] < 1e-3


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_mapping_would_show(found, name):
    assert found[name]["swapped"] > 1e-3
