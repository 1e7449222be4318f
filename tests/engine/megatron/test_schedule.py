"""Learning rates of each schedule, against their formulas; and which parameters decay."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LR, MIN, WARMUP, STEPS = 1e-2, 1e-3, 4, 20


def after_warmup(step: int) -> float:
    return (step - WARMUP) / (STEPS - WARMUP)


EXPECTED = {
    "constant": lambda step: LR,
    "linear": lambda step: LR + (MIN - LR) * after_warmup(step),
    "cosine": lambda step: MIN + (LR - MIN) * (1 + math.cos(math.pi * after_warmup(step))) / 2,
    "wsd": lambda step: LR if step <= STEPS - 5 else LR - (LR - MIN) * (step - STEPS + 5) / 5,
    "inverse-square-root": lambda step: max(MIN, LR * math.sqrt(WARMUP / step)),
}

PROGRAM = """
import json, sys, types
from msllm.engine.device import select_device
from msllm.engine.megatron.adapt import adapt
adapt(select_device("cpu"))
from msllm.config import TrainConfig
from msllm.engine.megatron.optimizer import build_schedule
out = {}
for name in json.loads(sys.argv[1]):
    train = TrainConfig(steps=20, lr=1e-2, min_lr=1e-3, warmup_steps=4, lr_schedule=name,
                        wsd_decay_steps=5)
    group = {"lr": 0.0, "max_lr": 1e-2, "min_lr": 1e-3, "lr_mult": 1.0, "wd_mult": 1.0,
             "weight_decay": 0.0}
    schedule = build_schedule(types.SimpleNamespace(param_groups=[group]), train)
    rates = []
    for _ in range(22):
        schedule.step(increment=1)
        rates.append(group["lr"])
    out[name] = rates
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def rates() -> dict[str, list[float]]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(list(EXPECTED))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", EXPECTED)
def test_rates_follow_the_formula(rates, name):
    for step in range(1, STEPS + 1):
        expected = LR * step / WARMUP if step <= WARMUP else EXPECTED[name](step)
        assert rates[name][step - 1] == pytest.approx(expected, rel=1e-9), step


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_the_last_step_reaches_the_minimum_and_stays_there(rates, name):
    assert rates[name][STEPS - 1 :] == pytest.approx([MIN] * 3)


def test_the_first_step_of_a_warmup_already_learns(rates):
    assert all(values[0] == pytest.approx(LR / WARMUP) for values in rates.values())
