"""The references of `npu::` operators have the real signatures and compute what torch does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.npu.references_check import CASES


@pytest.fixture(scope="module")
def found(npu) -> dict[str, Any]:
    return json.loads(npu.passes("references_check.py").splitlines()[-1])


def test_signatures_are_those_of_torch_npu(found):
    assert found["strangers"] == []


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(found, name):
    assert found["far"][name] < 1e-5


def test_gradients_came_from_torch_npus_formulas(found):
    backward = {
        "npu_rms_norm_backward",
        "npu_swiglu_backward",
        "npu_geglu_grad",
        "npu_rotary_mul_backward",
        "npu_fusion_attention_grad",
        "npu_moe_token_permute_with_routing_map_grad",
        "npu_moe_token_unpermute_with_routing_map_grad",
    }
    assert backward <= set(found["called"])
