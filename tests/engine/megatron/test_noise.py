"""Phi-3.5-MoE's randomness: there in training, nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.megatron.conftest import run_ranks
from tests.parity.case import Case
from tests.parity.moe_cases import PHIMOE

NOISE = {
    "quiet": {"input_jitter_noise": 0.0, "router_jitter_noise": 1e-9},
    "noisy": {"input_jitter_noise": 0.1, "router_jitter_noise": 1e-9},
    "drawn": {"input_jitter_noise": 0.0, "router_jitter_noise": 0.3},
}
"""One expert alone is near enough to the best one to be drawn, or several."""


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    folder, out = tmp_path_factory.mktemp("noise"), tmp_path_factory.mktemp("out") / "out.json"
    for name, noise in NOISE.items():
        Case(model_type="phimoe", config=PHIMOE | noise).write(folder / name)
    case = Path(__file__).with_name("noise_case.py")
    run_ranks(1, case, str(out), *(str(folder / name) for name in NOISE))
    return json.loads(out.read_text())


@pytest.mark.distributed
@pytest.mark.parametrize("name", NOISE)
def test_steps_are_random_where_the_config_says_so(losses, name):
    first, second = losses[name]["trained"]
    assert (first == second) == (name == "quiet")


@pytest.mark.distributed
@pytest.mark.parametrize("name", NOISE)
def test_evaluation_is_not(losses, name):
    first, second = losses[name]["evaluated"]
    assert first == second
    if name == "quiet":  # one expert near the best one has all of the weight, drawn or taken
        assert losses[name]["trained"][0] == pytest.approx(first, rel=1e-6)
