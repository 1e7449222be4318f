"""Every operator's NPU implementation against its reference, through the real torch_npu."""

import json
from dataclasses import dataclass

import pytest

from tests.npu.ops.cases import cases

KERNELS = (
    "FlashAttentionScore",
    "FlashAttentionVarLenScore",
    "RmsNorm",
    "SwiGlu",
    "GeGlu",
    "RotaryPositionEmbedding",
    "GroupedMatmul",
    "GroupedMatmulAdd",
    "MoeTokenPermuteWithRoutingMap",
    "MoeTokenUnpermuteWithRoutingMap",
    "MoeGatingTopK",
    "RingAttentionUpdate",
    "ApplyAdamW",
)


@dataclass(frozen=True)
class Report:
    ran: dict[str, int]
    failed: dict[str, dict[str, str]]
    launched: set[str]
    """Names of kernels."""


@pytest.fixture(scope="module")
def report(npu, tmp_path_factory) -> Report:
    log = tmp_path_factory.mktemp("npu") / "launched"
    out = npu.passes("ops/operators_check.py", NPU_STUB_LOG=str(log))
    kernels = {line.split()[0].removeprefix("aclnn") for line in log.read_text().splitlines()}
    return Report(**json.loads(out.splitlines()[-1]), launched=kernels)


@pytest.mark.parametrize("rung", ["trace", "values", "launch"])
def test_every_call_is_as_the_reference_says(report, rung):
    """In fp32, bf16 and fp16, forward and backward; see `operators_check`."""
    failed = report.failed[rung]
    assert not failed, "\n".join(f"{name}:\n{why}" for name, why in failed.items())
    assert report.ran[rung] == sum(rung in case.rungs for case in cases()) > 40


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_fused_kernel_is_launched(report, kernel):
    assert any(name.startswith(kernel) for name in report.launched), sorted(report.launched)


def test_products_over_ranks(npu):
    npu.job(2, "ops/ranks_check.py")


def test_names_of_cases_are_their_own():
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
