"""Weights that are published as 4-bit floats with a scale for 32 of them (MXFP4), as gpt-oss's.

The format is OCP's Microscaling v1.0: elements are E2M1, scales are E8M0, a power of two in a byte.
`X_blocks` holds two elements a byte, the first in the low half; `X_scales` a byte a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msllm.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of an element mean; the fourth is the sign."""


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack elements and multiply them by their groups' scales.

    Every product is a bfloat16 number, or beyond the largest one; a scale of 255 means none (NaN).

    Args:
        blocks: Bytes, [..., g, 16].
        scales: Bytes, [..., g].

    Returns:
        bfloat16, [..., g * 32].

    Raises:
        InputError: The shapes do not go together.
    """
    import torch

    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise InputError(
            f"blocks of shape {list(blocks.shape)} and scales of shape {list(scales.shape)} "
            "do not go together: a group has 16 bytes and one scale"
        )
    # two elements a look-up: a table of the 256 bytes, [256, 2]
    signed = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=blocks.device)
    byte = torch.arange(256, device=blocks.device)
    pairs = torch.stack([signed[byte & 15], signed[byte >> 4]], dim=1)
    elements = pairs[blocks.int()].flatten(-2)  # [..., g, 32]
    powers = scales.contiguous().view(torch.float8_e8m0fnu).float()
    return elements.mul_(powers[..., None]).bfloat16().flatten(-2)
