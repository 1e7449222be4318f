"""Weights that are published as 8-bit floats with a scale a block, as DeepSeek-V3's.

Beside `X.weight` in E4M3 is `X.weight_scale_inv`: what each block of 128 x 128 is multiplied by
(the inverse of what it was multiplied by to fill the range).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msllm.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = (128, 128)


def dequantise(
    weight: Tensor, scales: Tensor, first_row: int = 0, block: tuple[int, int] = BLOCK
) -> Tensor:
    """Multiply rows by their blocks' scales, in float32.

    Args:
        weight: Rows of a weight, [rows, i].
        scales: The scales of the whole weight, [ceil(o / block[0]), ceil(i / block[1])].
        first_row: Which row of the whole weight the first one is.
        block: Rows and columns that share a scale.

    Returns:
        The rows in bfloat16, [rows, i].

    Raises:
        InputError: There are not as many scales as the blocks need.
    """
    import torch

    rows, columns = weight.shape
    needed = -(-(first_row + rows) // block[0]), -(-columns // block[1])
    if scales.shape[0] < needed[0] or scales.shape[1] != needed[1]:
        raise InputError(
            f"{scales.shape[0]} x {scales.shape[1]} scales do not fit rows up to "
            f"{first_row + rows} of {columns} columns in blocks of {block[0]} x {block[1]}"
        )
    row_block = torch.arange(first_row, first_row + rows, device=weight.device) // block[0]
    column_block = torch.arange(columns, device=weight.device) // block[1]
    factors = scales.float()[row_block][:, column_block]
    return factors.mul_(weight.float()).bfloat16()
