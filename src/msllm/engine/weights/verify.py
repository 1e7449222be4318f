"""Compares two sets of weights tensor by tensor, whatever their formats and layouts are.

One tensor of each side is in memory, and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from msllm.engine.weights import matching, views
from msllm.engine.weights.folder_kind import Folder, find
from msllm.engine.weights.partial import Progress
from msllm.engine.weights.torch_dist import StoredTensor
from msllm.engine.weights.views import AsPublished, View
from msllm.errors import InputError
from msllm.models.architecture import Architecture
from msllm.models.hf_config import architecture_from_config, read_config

BLOCK = 2**22
"""Numbers compared at a time."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same on both sides.

    Attributes:
        name: Its name.
        a: Its shape and type on the first side; None where it is not there.
        b: Likewise, on the second.
        largest: The largest absolute difference of two values; None if they can't be compared.
        relative: The largest difference relative to the larger of the two.
        count: How many values differ by more than is tolerated.
    """

    name: str
    a: StoredTensor | None
    b: StoredTensor | None
    largest: float | None = None
    relative: float | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found: how many tensors and bytes were compared, and what differs."""

    tensors: int
    bytes: int
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def verify(
    a: Path,
    b: Path,
    *,
    tolerance: float | None = None,
    model: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Verdict:
    """Compare the weights in two folders.

    Args:
        a: A folder of Hugging Face weights, a checkpoint, or a run, whose newest it is then.
        b: Likewise.
        tolerance: Most by which values may differ, absolutely or relative to the larger; None
            where bits, and so types too, must be the same.
        model: A folder with the config of models that don't bring their own.
        progress: Called now and then.

    Raises:
        InputError: They can't be compared: a folder has no weights, they are damaged, or it is
            not known which model they are of.
    """
    first, second = _open(find(a), find(b), model)
    names = [name for name in first.tensors if name in second.tensors]
    total = sum(_bytes(first.tensors[name]) for name in names)
    found = list(_one_sided(first, second))
    begun, done = time.monotonic(), 0
    for name in names:
        sides = first.tensors[name], second.tensors[name]
        if sides[0].shape != sides[1].shape:
            found.append(Difference(name, *sides))
        else:
            found += _compared(name, sides, first, second, tolerance)
        done += _bytes(sides[0])
        if progress is not None:
            progress(Progress(done, total, time.monotonic() - begun))
    return Verdict(len(names), total, tuple(found))


def _open(a: Folder, b: Folder, model: Path | None) -> tuple[View, View]:
    """Open both sides so that the same tensor has the same name."""
    own = [views.architecture_of(folder) for folder in (a, b)]
    given = None if model is None else architecture_from_config(read_config(model))
    mapped = [arch is not None and matching.mapped(arch) is not None for arch in own]
    if a.kind.is_published and b.kind.is_published:
        sides = AsPublished(a.path), AsPublished(b.path)
        for side, arch, known in zip(sides, own, mapped, strict=True):
            if arch is not None and known:
                _forget_harmless(side, arch)
        return sides
    one, other = own[0] or given or own[1], own[1] or given or own[0]
    if one is None or other is None:
        raise InputError(
            "neither side says which model it is of",
            f"{a.asked} {b.asked}",
            "give --model, a folder with the model's config.json",
        )
    return views.parameters(a, one), views.parameters(b, other)


def _forget_harmless(side: AsPublished, architecture: Architecture) -> None:
    for name in [name for name in side.tensors if matching.harmless(name, architecture)]:
        del side.tensors[name]


def _one_sided(a: View, b: View) -> Iterator[Difference]:
    for name, held in a.tensors.items():
        if name not in b.tensors:
            yield Difference(name, held, None)
    for name, held in b.tensors.items():
        if name not in a.tensors:
            yield Difference(name, None, held)


def _compared(
    name: str,
    sides: tuple[StoredTensor, StoredTensor],
    first: View,
    second: View,
    tolerance: float | None,
) -> Iterator[Difference]:
    """Compare a tensor that has the same shape on both sides; give what differs, if anything."""
    largest = relative = 0.0
    count = 0
    for x, y in _blocks(first.tensor(name), second.tensor(name)):
        if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        absolute, share = _distances(x, y)
        largest, relative = (
            max(largest, float(absolute.max())),
            max(relative, float(share.max())),
        )
        if tolerance is None:
            same = x == y if x.dtype != y.dtype else _same_bits(x, y)
            count += int((~same).sum())
        else:
            count += int(((absolute > tolerance) & (share > tolerance)).sum())
    if count or (tolerance is None and sides[0].dtype != sides[1].dtype):
        yield Difference(name, *sides, largest, relative, count)


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut both in runs of numbers."""
    x, y = a.contiguous().view(-1), b.contiguous().view(-1)
    for start in range(0, len(x), BLOCK):
        yield x[start : start + BLOCK], y[start : start + BLOCK]


def _same_bits(x: Tensor, y: Tensor) -> Tensor:
    wide = x.element_size()
    return (x.view(torch.uint8) == y.view(torch.uint8)).view(-1, wide).all(dim=1)


def _distances(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Absolute differences, and those relative to the larger; no number and one are infinite."""
    x, y = x.double(), y.double()
    absolute = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
    absolute = absolute.nan_to_num(nan=torch.inf)
    larger = torch.maximum(x.abs(), y.abs())
    share = torch.where(absolute == 0, 0.0, absolute / larger)
    return absolute, share.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _bytes(held: StoredTensor) -> int:
    size = held.dtype.itemsize
    for length in held.shape:
        size *= length
    return size
