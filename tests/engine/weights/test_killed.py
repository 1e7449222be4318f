"""Conversions that are killed, and disks that are full, in processes of their own."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from msllm.engine.weights.to_mcore import hf_to_mcore
from msllm.engine.weights.verify import verify
from tests.parity.all_cases import CASES

COMMANDS = {
    "hf-to-mcore": ("--model", "hf"),
    "mcore-to-hf": ("--checkpoint", "mcore"),
    "mcore-to-mindspeed": ("--checkpoint", "mcore"),
}
SMALL_PARTS = """
import sys, threading
from msllm.cli.app import run
from msllm.engine.weights import partial, stored_parts, to_mcore

to_mcore.PART_BYTES = stored_parts.PART_BYTES = 50_000
if sys.argv[1] == "halt":
    done = partial.PartialFolder._record
    def record(self, number):
        if number == 3 and (self.path / partial.RECORDS / "000001.json").exists():
            threading.Event().wait()
        return done(self, number)
    partial.PartialFolder._record = record
sys.exit(run(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    CASES["qwen3"].write(folder / "hf")
    hf_to_mcore(folder / "hf", folder / "mcore")
    return folder


def start(halt: bool, arguments: list[str], **more) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SMALL_PARTS, "halt" if halt else "go", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def words(command: str, models: Path, out: Path) -> list[str]:
    flag, name = COMMANDS[command]
    return ["convert", command, flag, str(models / name), "--out", str(out)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_conversion_leaves_nothing_that_loads_and_goes_on(command, models, tmp_path):
    arguments = words(command, models, tmp_path / "out")
    process = start(True, arguments)
    records = tmp_path / ".out.partial" / ".parts"
    try:
        while not (records / "000001.json").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    before = {path.name: path.stat().st_mtime_ns for path in records.glob("0*.json")}
    assert len(before) >= 2

    process = start(False, arguments)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, out + err
    assert verify(models / "hf", tmp_path / "out", model=models / "hf").same
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_parts_that_were_done_are_not_done_again(models, tmp_path):
    arguments = words("hf-to-mcore", models, tmp_path / "out")
    process = start(True, arguments)
    folder = tmp_path / ".out.partial"
    while len(list((folder / ".parts").glob("00000[01].json"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.kill()
    process.communicate()
    first = (folder / "__0_0.distcp").stat().st_mtime_ns
    assert start(False, arguments).wait(timeout=900) == 0
    assert (tmp_path / "out" / "__0_0.distcp").stat().st_mtime_ns == first


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_is_full_in_the_middle(command, models, tmp_path):
    """A limit on the size of files stands for it: writing fails after some bytes."""
    most = 40_000
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most))
    process = start(False, words(command, models, tmp_path / "out"), preexec_fn=limit)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 2, err
    assert "are missing" in err
    assert list(tmp_path.iterdir()) == []
