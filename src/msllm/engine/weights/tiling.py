"""Whether boxes fill a larger box exactly: none of it is left out, nothing is there twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import product

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First indices and lengths, axis by axis."""
MOST_AXES = 8
"""Each axis that is cut doubles the corners; checkpoints cut three at most."""


def tiles(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether `boxes` tile a tensor of this shape; takes time linear in their number.

    Count 1 at a box's first corner and alternate the sign along each edge: differencing its
    indicator function along every axis gives these very counts. Summing undoes that, so the
    boxes cover each element once if, and only if, their counts add up to those of the whole.
    """
    held = list(boxes)
    cut = [axis for axis, size in enumerate(shape) if any(_is_cut(box, axis, size) for box in held)]
    if len(cut) > MOST_AXES or not all(len(o) == len(s) == len(shape) for o, s in held):
        return False
    if not math.prod(shape):
        return all(not math.prod(sizes) for _, sizes in held)
    counts: Counter[tuple[int, ...]] = Counter()
    whole = (tuple(0 for _ in shape), shape)
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in held)]:
        edges = [((offsets[a], 1), (offsets[a] + sizes[a], -1)) for a in cut]
        for corner in product(*edges):
            place = tuple(at for at, _ in corner)
            counts[place] += sign * math.prod(by for _, by in corner)
    return not any(counts.values())


def _is_cut(box: Box, axis: int, size: int) -> bool:
    offsets, sizes = box
    return axis >= len(offsets) or axis >= len(sizes) or (offsets[axis], sizes[axis]) != (0, size)
