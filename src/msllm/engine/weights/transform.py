"""Moves values between published tensors and Megatron's parameters as a weight map says.

Works on whole tensors, in either direction, and bit for bit: no arithmetic, no files, no
communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msllm.models.weight_map import Run, Weight

if TYPE_CHECKING:
    from torch import Tensor


def rows(tensor: Tensor, run: Run) -> Tensor:
    """A view on a run's rows of a published tensor: `[count, width]`, or `[count]` of a vector."""
    matrix = tensor if run.expert is None else tensor[run.expert]
    if run.transposed:
        matrix = matrix.t()
    return matrix[run.first : run.first + (run.count - 1) * run.step + 1 : run.step]


def gather(weight: Weight, read: Callable[[Run], Tensor]) -> Tensor:
    """A Megatron parameter, whole, out of the rows that `read` gives."""
    import torch

    parts = [read(run) for run in weight.runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def scatter(weight: Weight, values: Tensor, published: Callable[[str], Tensor]) -> None:
    """Write a Megatron parameter's rows to where they belong in published tensors.

    Rows of `values` behind the last one mapped pad the vocabulary and belong nowhere.
    """
    for target in (weight, *weight.duplicates()):
        start = 0
        for run in target.runs:
            rows(published(run.tensor), run).copy_(values[start : start + run.count])
            start += run.count


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite numbers; their extremes tell it in one fast pass."""
    import torch

    if not tensor.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
