"""The simulator computes as a device does and refuses what a device refuses."""

from __future__ import annotations

import pytest

ANSWERS = {
    "mixed": "Expected all tensors to be on the same device",
    "mixed in a list": "Expected all tensors to be on the same device",
    "mixed npu": "Expected all tensors to be on the same device",
    "scalar": "nothing",
    "copied": "nothing",
    "moved": "[2.0, 2.0, 2.0, 2.0]",
    "through a view": "[1.0, 5.0, 5.0, 1.0]",
    "fresh": "[nan, nan]",
    "mixed types": "queries, keys and values of several types",
    "unknown": "no reference for npu::npu_fast_gelu",
    "calls": "['npu_fusion_attention', 'npu_fast_gelu']",
}


@pytest.fixture(scope="module")
def lines(npu) -> list[str]:
    return npu.passes("simulator_check.py").splitlines()


@pytest.mark.parametrize("question", ANSWERS)
def test_answers(lines, question):
    (answer,) = [line for line in lines if line.startswith(f"{question}:")]
    assert ANSWERS[question] in answer


def test_operators_without_a_kernel_are_noted(lines):
    before, after = [line for line in lines if line.startswith("no kernel:")]
    assert before == "no kernel: set()"
    assert "aten::special_zeta" in after
