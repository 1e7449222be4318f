"""Slice: the part of a whole parameter that one rank holds. Pure integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Box = tuple[slice, ...]
"""Indices of a block, axis by axis."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a global matrix, or vector, that a rank holds.

    Attributes:
        name: Its global name.
        axis: Axis along which tensor parallelism cuts it (0: output rows, 1: input columns).
        width: Length of the other axis; 0 for a vector.
        runs: `(first, count)` of each run of global rows (or columns) held, in the order held.
    """

    name: str
    axis: int
    width: int
    runs: tuple[tuple[int, int], ...]

    @property
    def is_vector(self) -> bool:
        """Whether it has one axis only."""
        return self.width == 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own shape."""
        held = sum(count for _, count in self.runs)
        if self.is_vector:
            return (held,)
        return (held, self.width) if self.axis == 0 else (self.width, held)

    def overlaps(self, first: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[Box, Box]]:
        """What it has in common with a block of the whole parameter, as boxes of it and the block.

        Args:
            first: The block's first row, and column where there are any.
            sizes: Its lengths.
        """
        end, begun = first[self.axis] + sizes[self.axis], first[self.axis]
        mine = [slice(a, a + n) for a, n in zip(first, sizes, strict=True)]
        theirs = [slice(0, n) for n in sizes]
        start = 0
        for run, count in self.runs:
            low, high = max(run, begun), min(run + count, end)
            if low < high:
                mine[self.axis] = slice(start + low - run, start + high - run)
                theirs[self.axis] = slice(low - begun, high - begun)
                yield tuple(mine), tuple(theirs)
            start += count


def rows_held(rows: int, rank: int, size: int, gated: bool) -> tuple[tuple[int, int], ...]:
    """Runs of rows of a rank that holds `rows` of them; `size` ranks hold as many each.

    A gated projection has gate rows, then up rows, each spread over the group.
    """
    if not gated:
        return ((rank * rows, rows),)
    half = rows // 2
    return ((rank * half, half), (size * half + rank * half, half))
