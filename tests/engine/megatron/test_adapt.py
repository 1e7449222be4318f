"""Every adaptation is needed: what works with it fails without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import msllm
from tests.engine.megatron.adapt_case import CASES
from tests.engine.megatron.conftest import HERE, free_port

SOURCES = Path(msllm.__file__).parent
ONLY_NPU = {"transfer_to_npu"}


def run_case(*arguments: str) -> subprocess.CompletedProcess[str]:
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job |= {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "adapt_case.py"), *arguments],
        env=os.environ | job,
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_every_adaptation_has_a_case():
    program = (
        "from msllm.engine.megatron.adapt import ADAPTATIONS\n"
        "print(*[a.name for a in ADAPTATIONS if a.reason and a.kinds])"
    )
    names = set(run_python(program).stdout.split())
    assert names == set(CASES) | ONLY_NPU


def test_all_cases_work_with_all_adaptations():
    done = run_case("all")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_fails_without_it(name):
    without = run_case(name, "skip")
    assert without.returncode == 3, without.stderr[-2000:]


def test_refuses_to_come_too_late():
    done = run_python(
        "import megatron.core\n"
        "from msllm.engine.device import select_device\n"
        "from msllm.engine.megatron.adapt import adapt\n"
        "adapt(select_device('cpu'))"
    )
    assert "must run before megatron.core is imported" in done.stderr


def test_npu_gets_torch_npus_own_redirection(tmp_path):
    """With a pretended torch_npu, whose module only notes that it was imported."""
    package = tmp_path / "torch_npu" / "contrib"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "transfer_to_npu.py").write_text("print('redirected')")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from msllm.engine.device import Device\n"
        "from msllm.engine.megatron.adapt import adapt, applied\n"
        "adapt(Device('npu', 0)); print(applied()[0])"
    )
    assert run_python(program).stdout.split() == ["redirected", "transfer_to_npu"]


DEVICE_NAMED = re.compile(r"""torch\.cuda|\.cuda\(|["']cuda["']""")
MAY_NAME_IT = {
    "engine/device.py", "engine/megatron/adapt.py",
    "config.py", "cli/recipe.py", "engine/planning/memory.py",  # kinds of device, as data
}  # fmt: skip


def test_no_other_file_names_the_device():
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if DEVICE_NAMED.search(path.read_text())
    }
    assert found <= MAY_NAME_IT


PATCH = re.compile(
    r"^\s*(torch|megatron|transformers)(\.\w+)+\s*=[^=]|setattr\(\s*(torch|megatron)"
)


def test_no_other_file_patches_anything():
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if re.search(PATCH.pattern, path.read_text(), re.MULTILINE)
    }
    assert found == {"engine/megatron/adapt.py"}
