"""Traces against real jobs of two processes: bytes held, bytes sent."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE / "truth_cases.py"
NAMES = (
    "data", "tensor", "tensor-bf16-full", "pipeline", "interleaved", "experts",
    "experts-tensor", "experts-gathered", "latent",
)  # fmt: skip
SCALARS = 64
"""Bytes of a step's loss and token counts, which are summed outside of the traced part."""


def start(mode: str, out: Path, **environment: str) -> subprocess.Popen[bytes]:
    beside = os.pathsep.join(
        [str(HERE), str(HERE.parent / "megatron"), os.environ.get("PYTHONPATH", "")]
    )
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), mode, str(out)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": beside, **environment},
            stdout=log,
            stderr=log,
        )


def finish(process: subprocess.Popen[bytes], out: Path) -> dict[str, Any]:
    try:
        process.wait(600)
        assert process.returncode == 0, out.with_suffix(".log").read_text()[-4000:]
    finally:
        process.kill()
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Reports of both ranks."""
    folder = tmp_path_factory.mktemp("real")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    outs = [folder / f"{rank}.json" for rank in range(2)]
    processes = [
        start("real", out, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", **address)
        for rank, out in enumerate(outs)
    ]
    try:
        yield [finish(process, out) for process, out in zip(processes, outs, strict=True)]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("traced") / "out.json"
    return finish(start("traced", out), out)


def pairs(name: str, traced: dict[str, Any], real: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Each stage's trace with the reports of its ranks."""
    stages = traced[name]
    each = 2 // len(stages)
    for stage, report in enumerate(stages):
        yield report, [rank[name] for rank in real[stage * each : (stage + 1) * each]]


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_what_stays_from_step_to_step_is_exact(traced, real, name):
    items = ("parameters", "gradients", "main parameters", "optimizer state")
    for report, ranks in pairs(name, traced, real):
        assert {i: report[i] for i in items} == {i: ranks[0][i] for i in items}


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_of_activations_is_within_a_tenth(traced, real, name):
    for report, ranks in pairs(name, traced, real):
        mean = sum(rank["peak"] for rank in ranks) / len(ranks)  # routing is not quite balanced
        assert report["peak"] == pytest.approx(mean, rel=0.1)


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("phase", ["step", "gathering"])
def test_each_collectives_bytes_are_exact(traced, real, name, phase):
    for report, ranks in pairs(name, traced, real):
        sent = [{**rank[phase]} for rank in ranks]
        for bytes_sent in sent:  # point to point, torch tells no group
            for key in [key for key in bytes_sent if key.startswith("send")]:
                bytes_sent["send pp"] = bytes_sent.pop(key)
        for key in {key for each in (report[phase], *sent) for key in each}:
            # rows that go to experts are as many over all ranks, whatever the routing
            mean = sum(each.get(key, 0) for each in sent) / len(sent)
            assert report[phase].get(key, 0) == pytest.approx(mean, abs=SCALARS, rel=0), key


@pytest.mark.distributed
def test_a_message_is_the_whole_of_what_is_gathered_or_summed(real):
    for rank in real:
        assert rank["noted"] == {
            "all-reduce two": 40,
            "broadcast two": 80,
            "all-gather two": 80,
            "reduce-scatter two": 80,
            "all-to-all two": 80,
        }


def products(record: dict[str, Any]) -> list[Any]:
    return sorted(key for key in record["work"] if key[1])


@pytest.mark.parametrize("index", range(4))
def test_equal_layers_may_be_counted_instead_of_traced(traced, index):
    counted, whole = traced["folded"][index]
    for name in ("static", "parameters", "updated"):
        assert counted[name] == whole[name]
    for name in ("reduction", "gathering"):
        assert counted[name]["collectives"] == whole[name]["collectives"]
    for one, other in zip(counted["chunks"], whole["chunks"], strict=True):
        assert one["left"] == other["left"]
        forward, full = one["forward"], other["forward"]
        for name in ("end", "peak"):
            assert forward[name] - forward["start"] == full[name] - full["start"]
        peaks = [each["backward"]["peak"] - each["forward"]["start"] for each in (one, other)]
        assert peaks[0] == pytest.approx(peaks[1], abs=SCALARS)
        for phase in ("forward", "backward"):
            assert products(one[phase]) == products(other[phase])
            assert sorted(one[phase]["collectives"]) == sorted(other[phase]["collectives"])
            moved = [sum(k[2] * k[3] for k in each[phase]["work"]) for each in (one, other)]
            # the first backward pass makes a few vectors that later ones find
            assert moved[0] == pytest.approx(moved[1], rel=1e-3)
