"""The device models: complete, right where the engine knows a figure too, found by name."""

from __future__ import annotations

import pytest
import torch

from msllm.engine.device import published_peak_flops
from msllm.errors import InputError
from msllm.models.device_models import DEFAULT, device_model, device_models

HARDWARE = {"Ascend910C": "Ascend910_9392"}
"""Model -> the hardware's own name, where it is another."""


@pytest.mark.parametrize("name", device_models())
def test_speeds_are_those_that_training_reports_mfu_by(name):
    device, hardware = device_models()[name], HARDWARE.get(name, name)
    assert device.bf16 == published_peak_flops(hardware, torch.bfloat16)
    assert device.fp32 == published_peak_flops(hardware, torch.float32)
    assert device.peak("bf16") == device.bf16 > device.peak("fp32") == device.fp32


@pytest.mark.parametrize("name", device_models())
def test_figures_are_sensible(name):
    device = device_models()[name]
    assert 16 * 2**30 < device.memory < 256 * 2**30
    assert device.memory_bandwidth > device.node_bandwidth > device.network_bandwidth > 1e9
    shares = device.efficiency
    for share in (shares.matmul, shares.attention, shares.memory, shares.links):
        assert 0 < share < 1


def test_names_are_found_in_any_case():
    assert device_model("ascend910b4").memory_gib == 32
    assert device_model(DEFAULT).kind == "npu"


def test_unknown_names_get_the_closest():
    with pytest.raises(InputError, match="Ascend910B") as caught:
        device_model("Ascend920B")
    assert "H100" in caught.value.problems[0].hint
