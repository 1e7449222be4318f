"""4-bit weights, against transformers, which gives them transposed, and the format's definition."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from msllm.engine.weights.mxfp4 import dequantise
from msllm.errors import InputError


def test_random_blocks_are_as_transformers_has_them():
    torch.manual_seed(1)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(1, 252, (3, 10, 4), dtype=torch.uint8)
    found = dequantise(blocks, scales)
    assert found.shape == (3, 10, 128)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales).transpose(1, 2))


def test_every_element_is_what_the_format_says():
    """E2M1: a sign, two bits of exponent with a bias of 1, one of mantissa, and subnormals."""
    blocks = torch.tensor([16 * high + low for high in range(16) for low in (0, 1)] * 4)
    found = dequantise(blocks.reshape(8, 16).byte(), torch.full((8,), 127).byte()).reshape(-1, 2)

    def value(bits: int) -> float:
        sign, exponent, mantissa = -1.0 if bits & 8 else 1.0, bits >> 1 & 3, bits & 1
        return sign * (
            mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        )

    for byte, (first, second) in zip(blocks.tolist(), found.tolist(), strict=True):
        assert (first, second) == (value(byte & 15), value(byte >> 4))


def test_each_group_has_its_own_scale_and_255_is_none():
    blocks = torch.full((4, 16), 0x22, dtype=torch.uint8)
    found = dequantise(blocks, torch.tensor([0, 127, 254, 255], dtype=torch.uint8)).reshape(4, 32)
    for row, power in zip(found[:3], (2.0**-127, 1.0, 2.0**127), strict=True):
        assert set(row.tolist()) == {power}
    assert found[3].isnan().all()


def test_slices_of_a_larger_tensor_do():
    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (6, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (6, 8, 2), dtype=torch.uint8)
    found = dequantise(blocks[2, ::2], scales[2, ::2])
    assert torch.equal(found, dequantise(blocks, scales)[2, ::2])


@pytest.mark.parametrize(("blocks", "scales"), [((2, 4, 16), (2, 3)), ((2, 4, 8), (2, 4))])
def test_shapes_must_go_together(blocks, scales):
    with pytest.raises(InputError, match="do not go together"):
        dequantise(torch.zeros(blocks, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8))
