"""`npu`: runs a check file in processes that have the real torch_npu and pretended devices."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.megatron.conftest import run_ranks
from tests.npu.environment import Environment, Unavailable, prepare

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Npu:
    """Runs files of `tests/npu` where `npu` is a device."""

    environment: Environment

    def check(
        self, name: str, *arguments: str, devices: int = 8, timeout: int = 900, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one process and give what it printed, whatever its exit status."""
        return subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / name), *arguments],
            env=os.environ | self.environment.variables(devices) | more,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def passes(self, name: str, *arguments: str, **settings: str) -> str:
        """Run one process that must succeed; returns its stdout."""
        done = self.check(name, *arguments, **settings)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return done.stdout

    def job(self, world: int, name: str, *arguments: str) -> None:
        """Run `world` processes that form a job; all must succeed."""
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in self.environment.variables().items():
                patch.setenv(variable, value)
            run_ranks(world, HERE / name, *arguments, timeout=900)


@pytest.fixture(scope="session")
def npu() -> Npu:
    try:
        return Npu(prepare())
    except Unavailable as reason:
        warnings.warn(f"NPU code is NOT tested: {reason}", stacklevel=1)
        pytest.skip(f"NPU code is not tested: {reason}")
