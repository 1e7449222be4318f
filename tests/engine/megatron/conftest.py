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
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TIMEOUT = 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(world_size: int, script: Path, *arguments: str, timeout: int = TIMEOUT) -> None:
    """Run `script` in `world_size` processes that form one job; fail with the worst log."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    job["PYTHONPATH"] = os.pathsep.join(paths)  # cases import from `tests`
    ranks = []
    for rank in range(world_size):
        env = os.environ | job | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size)}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(script), *arguments],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    logs = []
    try:
        for process in ranks:
            logs.append(process.communicate(timeout=timeout)[0])
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    failed = [(r.returncode, log) for r, log in zip(ranks, logs, strict=True) if r.returncode]
    assert not failed, f"exit status {failed[0][0]}:\n{failed[0][1][-4000:]}"


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
