"""`pretrain --device npu` learns what it learns on a CPU, in every family that msllm trains.

Both sides are a process that takes all models through MegatronBackend. On the pretended NPU all of
torch_npu and msllm's operators for it run; the simulator computes the kernels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from msllm.models.support import proven_levels
from tests.engine.megatron.conftest import run_ranks
from tests.npu import families
from tests.npu.families import ALL, FAMILIES, VARIANTS

NAMES = [*FAMILIES, *VARIANTS]
JOBS = {"llama": {"tp": 2}, "qwen3_moe": {"ep": 2}}
CHECK = Path(__file__).with_name("training_check.py")


class Runs:
    """What each case came to on a device, one process for all of them."""

    def __init__(self, folder: Path, npu: Any) -> None:
        self.folder, self.npu = folder, npu
        for name in NAMES:
            families.write(name, folder / "models")

    def of(self, kind: str, name: str) -> dict[str, Any]:
        """Losses, norms and gradients of a case in one process on `cpu` or `npu`."""
        out = self.folder / kind
        if not out.exists():
            out.mkdir()
            self.run(kind, 1, out, {}, *NAMES)
        return self.read(out, name, 0)

    def run(self, kind: str, world: int, out: Path, sizes: dict[str, int], *names: str) -> None:
        arguments = (kind, str(self.folder / "models"), str(out), json.dumps(sizes), *names)
        if kind == "npu":
            self.npu.job(world, CHECK.name, *arguments)
        else:
            run_ranks(world, CHECK, *arguments)

    @staticmethod
    def read(out: Path, name: str, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(out / f"{name}.{rank}.pt")
        assert "error" not in found, found["error"]
        return found


@pytest.fixture(scope="module")
def runs(npu, tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("npu"), npu)


def test_every_family_has_a_case():
    assert {ALL[name].model_type for name in FAMILIES} == set(proven_levels())


def equal(there: dict[str, Any], here: dict[str, Any]) -> None:
    assert there["losses"] == pytest.approx(here["losses"], abs=1e-5)
    assert there["norms"] == pytest.approx(here["norms"], rel=1e-5)
    assert there["gradients"].keys() == here["gradients"].keys()
    for parameter, gradient in here["gradients"].items():
        far = (there["gradients"][parameter] - gradient).abs().max()
        assert far <= 1e-5 * max(gradient.abs().max(), 0.1), parameter


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_on_a_cpu(runs, name):
    equal(runs.of("npu", name), runs.of("cpu", name))


@pytest.mark.parametrize("name", NAMES)
def test_fused_operators_are_used(runs, name):
    called = set(runs.of("npu", name)["calls"]) - families.TORCHS
    assert called == families.expected_operators(name)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_goes_back_to_the_cpu(runs, name):
    assert runs.of("npu", name)["fallbacks"] == []


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_train_as_two_on_a_cpu(runs, name, tmp_path):
    for kind in ("cpu", "npu"):
        (tmp_path / kind).mkdir()
        runs.run(kind, 2, tmp_path / kind, JOBS[name], name)
    for rank in range(2):
        equal(*(runs.read(tmp_path / kind, name, rank) for kind in ("npu", "cpu")))
