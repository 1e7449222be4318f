"""Every adaptation is needed: what works with it fails without it."""

from __future__ import annotations

import ast
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
ONLY_NPU = {"transfer_to_npu", "compute_capability"}
NO_CUDA = "Torch not compiled with CUDA enabled"
WITHOUT = {
    "eager_functions": "wrapped by torch.compile",
    "cuda_runtime": NO_CUDA,
    "cuda_factories": NO_CUDA,
    "cuda_methods": NO_CUDA,
    "tensor_type_names": "AssertionError in clip_grad_by_total_norm_fp32",
    "rng_tracker": NO_CUDA,
    "recompute_without_fp8": "FP8GlobalStateManager",
    "adam_step": "'step'",
    "router_gemm": "te_general_gemm",
    "split_sizes": "all_to_all_single wants no tensor",
    "grouped_matmul": "Grouped GEMM is not available",
    "rotary": "must match the size of tensor",
    "permute": "not our operator",
    "collectives_alone": "whole buffers went to themselves",
}
"""What each case says without its adaptation: it must fail for that reason and no other."""


def run_case(*arguments: str) -> subprocess.CompletedProcess[str]:
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job |= {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "adapt_case.py"), *arguments],
        env=os.environ | job,
        capture_output=True,
        text=True,
        timeout=900,
    )


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


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
    assert WITHOUT[name] in without.stdout


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


DEVICE_USED = re.compile(r"torch\.cuda|\.cuda\(")
DEVICE_NAMED = re.compile(r"""["']cuda["']""")
USES_IT = {"engine/device.py", "engine/megatron/adapt.py"}
KINDS_AS_DATA = {
    "config.py",
    "cli/recipe.py",
    "engine/planning/memory.py",
    "engine/planning/operators.py",
    "models/device_models.py",
}


def sources() -> dict[str, str]:
    found = {p.relative_to(SOURCES).as_posix(): p.read_text() for p in SOURCES.rglob("*.py")}
    assert found.keys() >= USES_IT | KINDS_AS_DATA
    return found


def test_no_other_file_uses_or_names_the_device():
    used = {path for path, text in sources().items() if DEVICE_USED.search(text)}
    named = {path for path, text in sources().items() if DEVICE_NAMED.search(text)}
    assert used <= USES_IT
    assert named <= USES_IT | KINDS_AS_DATA


def patches(text: str) -> list[str]:
    """Assignments to attributes of anything imported from the libraries, `setattr` included."""
    tree, imported = ast.parse(text), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                origin = getattr(node, "module", None) or alias.name
                if origin.split(".")[0] in ("torch", "megatron", "transformers", "torch_npu"):
                    imported.add((alias.asname or alias.name).split(".")[0])

    def of_library(node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in imported

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            target = node
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            target = node.args[0]
        else:
            continue
        if of_library(target):
            found.append(ast.unparse(node))
    return found


def test_no_other_file_patches_anything():
    found = {path for path, text in sources().items() if patches(text)}
    assert found == {"engine/megatron/adapt.py"}


def test_patches_are_seen():
    assert patches("from megatron.core import parallel_state as p\np.rank = 1")
    assert patches("import torch\nsetattr(torch.nn, 'x', 1)")
    assert patches("from torch import Tensor\nTensor.to += 1")
    assert not patches("import torch\nx = torch.ones(1)\nx.flag = True")
