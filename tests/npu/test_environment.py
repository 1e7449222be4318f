"""The real torch_npu loads beside the installed torch, and nobody else gets to see it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from tests.npu import environment
from tests.npu.environment import Unavailable


def test_torch_npu_is_the_one_of_this_torch(npu):
    out = npu.passes("loads_check.py", devices=3)
    version, devices, name, operators = out.splitlines()[-1].split()
    torch = importlib.metadata.version("torch").split("+")[0]
    assert version.split("+")[0].startswith(torch)
    assert (devices, name) == ("3", "Ascend910B1")
    assert int(operators) > 300


def test_without_pretended_devices_there_is_none(npu):
    done = npu.check("loads_check.py", devices=0)
    assert "torch_npu works, but no NPU is visible" in done.stderr


def test_the_default_environment_has_no_torch_npu(npu):
    find = "import importlib.util as u, torch; print(u.find_spec('torch_npu'))"
    done = subprocess.run([sys.executable, "-c", find], capture_output=True, text=True)
    assert done.stdout.strip() == "None", done.stderr


def test_a_kernel_is_logged_with_its_shapes(npu, tmp_path):
    log = tmp_path / "log"
    npu.passes("loads_check.py", "kernel", NPU_STUB_LOG=str(log))
    assert "aclnnSwiGlu f32[4,6] f32[4,3]" in log.read_text().splitlines()


def test_a_version_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Unavailable, match=r"torch_npu for torch 0\.1 can't be installed"):
        environment._fetch(tmp_path / "site", "0.1")
