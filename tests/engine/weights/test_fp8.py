"""Block-scaled 8-bit weights, against transformers and against plain loops."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from msllm.engine.weights.fp8 import dequantise
from msllm.errors import InputError


def quantised(o: int, i: int, block: tuple[int, int] = (128, 128)):
    torch.manual_seed(o + i)
    weight = (torch.randn(o, i) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-o // block[0]), -(-i // block[1])) * 10 + 1e-3
    return weight, scales


@pytest.mark.parametrize(("o", "i"), [(128, 256), (300, 500), (1, 1), (129, 127), (576, 7168)])
def test_whole_weights_are_as_transformers_has_them(o, i):
    weight, scales = quantised(o, i)
    truth = _dequantize_fp8_weight(weight, scales, (128, 128), torch.float32)
    found = dequantise(weight, scales)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, truth.bfloat16())


@pytest.mark.parametrize("block", [(128, 128), (3, 5), (64, 1)])
def test_elements_are_multiplied_by_their_own_blocks_scale(block):
    weight, scales = quantised(13, 17, block)
    found = dequantise(weight, scales, block=block)
    for row in range(13):
        for column in range(17):
            scale = scales[row // block[0], column // block[1]]
            assert found[row, column] == (weight[row, column].float() * scale).bfloat16()


@pytest.mark.parametrize(("first", "count"), [(0, 300), (0, 1), (127, 2), (129, 171), (299, 1)])
def test_rows_are_those_of_the_whole(first, count):
    weight, scales = quantised(300, 260)
    found = dequantise(weight[first : first + count], scales, first)
    assert torch.equal(found, dequantise(weight, scales)[first : first + count])


def test_scales_that_are_powers_in_a_byte():
    weight, _ = quantised(130, 256)
    scales = torch.tensor([[120, 127], [128, 140]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    truth = dequantise(weight, torch.tensor([[2.0**-7, 1.0], [2.0, 2.0**13]]))
    assert torch.equal(dequantise(weight, scales), truth)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (3, 4)])
def test_scales_must_fit(shape):
    weight, scales = quantised(300, 300)
    assert scales.shape == (3, 3)
    with pytest.raises(InputError, match="do not fit"):
        dequantise(weight, torch.ones(shape))
