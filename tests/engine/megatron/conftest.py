"""Runs jobs of several real processes (gloo on 127.0.0.1) and keeps what they report.

One job for each world size goes through all cases one after another, so that the cost of starting
processes is paid three times and not once a case.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TIMEOUT = 1800
REST = 0.05


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(world_size: int, script: Path, *arguments: str, timeout: int = TIMEOUT) -> None:
    """Run `script` in `world_size` processes that form one job; fail with the worst log."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    job["PYTHONPATH"] = os.pathsep.join(paths)  # cases import from `tests`
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(world_size)]
        ranks = []
        for rank, log in enumerate(logs):
            env = os.environ | job | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size)}
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-W", "ignore", str(script), *arguments]
            with log.open("w") as out:
                ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
        try:
            failed = wait(ranks, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if failed:
            pytest.fail("\n".join(f"{why}:\n{logs[n].read_text()[-4000:]}" for n, why in failed))


def wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> list[tuple[int, str]]:
    """Wait for all ranks, or for the first that fails: the others may then wait forever.

    Time is counted in rests, not by the clock, which jumps where a virtual machine is halted.
    """
    for _ in range(int(timeout / REST)):
        codes = [process.poll() for process in ranks]
        if failed := [(n, f"exit status {code}") for n, code in enumerate(codes) if code]:
            return failed
        if None not in codes:
            return []
        time.sleep(REST)
    return [(n, f"not done after {timeout} s") for n, p in enumerate(ranks) if p.poll() is None]


class Jobs:
    """Runs all cases of a world size on first use; hands out each case's report."""

    def __init__(self, folder: Path, cases: dict[int, list[dict[str, Any]]]):
        self._folder, self._cases = folder, cases
        self._reports: dict[int, dict[str, Any]] = {}

    def report(self, world_size: int, name: str) -> dict[str, Any]:
        if world_size not in self._reports:
            cases, out = self._folder / f"{world_size}.json", self._folder / f"out{world_size}.json"
            cases.write_text(json.dumps(self._cases[world_size]))
            run_ranks(world_size, HERE / "train_cases.py", str(cases), str(out))
            self._reports[world_size] = json.loads(out.read_text())
        return self._reports[world_size][name]


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    from tests.engine.megatron.cases import CASES

    return Jobs(tmp_path_factory.mktemp("jobs"), CASES)
