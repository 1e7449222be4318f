"""Equal layers are traced a few times and counted as often as there are: pure integers.

A chunk whose layers repeat is traced with two and with three repetitions. What a repetition adds
is their difference, and the test beside it holds the sum to a trace of all layers. Where the most
memory is not held at the end of the repetitions, it does not grow with them: then all are traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from msllm.engine.planning.records import ChunkTrace, Record
from msllm.models.architecture import Architecture

LONGEST = 4
"""Layers of the longest repetition looked for, in units of recomputed blocks."""


SCALARS = 64
"""Bytes of single numbers by which two traces' peaks may be off."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A chunk's layers: `head` ones, then `times` repetitions of `unit` ones."""

    head: int
    unit: int
    times: int

    @property
    def lengths(self) -> tuple[int, int]:
        """Layers of the two traces."""
        return self.head + 2 * self.unit, self.head + 3 * self.unit


def layer_kinds(architecture: Architecture, layers: Sequence[int]) -> list[Hashable]:
    """Of each layer, what its cost depends on."""
    return [
        (
            architecture.layer_kind(layer),
            architecture.has_experts(layer),
            architecture.is_sliding(layer),
            architecture.heads(layer),
        )
        for layer in layers
    ]


def fold(kinds: Sequence[Hashable], block: int = 1) -> Fold | None:
    """Find the repetition that saves most; None where tracing all layers is as quick.

    Args:
        kinds: What each layer is.
        block: Layers that are recomputed together; repetitions are multiples of it.
    """
    best: tuple[int, Fold] | None = None
    for unit in range(block, LONGEST * block + 1, block):
        head = 0
        while not all(kinds[i] == kinds[i + unit] for i in range(head, len(kinds) - unit)):
            head += 1
        head += (len(kinds) - head) % unit
        found = Fold(head, unit, (len(kinds) - head) // unit)
        traced = sum(found.lengths)
        fits = head % block == 0 and found.times > 3 and traced < len(kinds)
        if fits and (best is None or traced < best[0]):
            best = traced, found
    return best[1] if best else None


def unfold(two: ChunkTrace, three: ChunkTrace, times: int) -> ChunkTrace | None:
    """Give the trace of `times` repetitions from those of two and three; None if it can't be."""
    more = times - 3
    grown, left = three.kept - two.kept, three.left - two.left
    most = max(grown, left)  # backward, what modules keep comes instead of what is freed
    rises = (
        three.forward_peak - two.forward_peak - grown,
        three.backward_peak - two.backward_peak - most,
    )
    if max(map(abs, rises)) > SCALARS:
        return None
    base = three.forward.start
    forward = Record(
        _grown(two.forward.work, three.forward.work, more),
        _grown(two.forward.collectives, three.forward.collectives, more),
        base,
        three.forward.end + more * grown,
        three.forward.peak + more * grown,
    )
    backward = Record(
        _grown(two.backward.work, three.backward.work, more),
        _grown(two.backward.collectives, three.backward.collectives, more),
        forward.end,
        three.backward.end,
        three.backward.peak + more * most,
    )
    return ChunkTrace(forward, backward, three.left + more * left)


def _grown(two: Counter[Any], three: Counter[Any], more: int) -> Counter[Any]:
    return Counter({key: n + more * (n - two[key]) for key, n in three.items()})
