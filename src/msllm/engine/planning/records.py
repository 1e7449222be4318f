"""What a trace yields, as plain numbers: no torch, so that it can be sent between processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

Work = tuple[str, int, int]
"""One operation: `matmul`, `attention` or `memory`; FLOPs; bytes read and written."""
Collective = tuple[str, str, int]
"""One collective: its name, its group's name, bytes of the whole of what it moves or sums."""


@dataclass
class Record:
    """What was done in one phase of a step.

    Attributes:
        work: How often each operation.
        collectives: How often each collective.
        start: Bytes held when the phase began.
        end: Bytes held when it ended.
        peak: Most bytes held in it.
    """

    work: Counter[Work] = field(default_factory=Counter)
    collectives: Counter[Collective] = field(default_factory=Counter)
    start: int = 0
    end: int = 0
    peak: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products and attention."""
        return sum(flops * times for (_, flops, _), times in self.work.items())

    def bytes_by_group(self) -> Counter[tuple[str, str]]:
        """Bytes of collectives by (name, group)."""
        found: Counter[tuple[str, str]] = Counter()
        for (name, group, size), times in self.collectives.items():
            found[name, group] += size * times
        return found


@dataclass
class ChunkTrace:
    """One micro-batch through one pipeline chunk, forward and backward.

    `left` are bytes of it that modules keep until their next micro-batch.
    """

    forward: Record
    backward: Record
    left: int = 0

    @property
    def kept(self) -> int:
        """Bytes held from the end of the forward pass to the backward pass."""
        return self.forward.end - self.forward.start

    @property
    def forward_peak(self) -> int:
        """Most bytes held in the forward pass, beyond those held before."""
        return self.forward.peak - self.forward.start

    @property
    def backward_peak(self) -> int:
        """Most bytes held in the backward pass, beyond those held before the forward pass."""
        return self.backward.peak - self.forward.start


@dataclass
class StageTrace:
    """One stage's part of a step, of its first rank.

    Attributes:
        stage: Which pipeline stage.
        static: Bytes that stay from step to step, by item.
        parameters: Number of parameters on the device.
        updated: How many of them this rank's optimizer updates.
        chunks: A micro-batch through each chunk.
        reduction: Reducing the gradients, once a step.
        gathering: Gathering the parameters, once a step.
    """

    stage: int
    static: dict[str, int]
    parameters: int
    updated: int
    chunks: list[ChunkTrace]
    reduction: Record
    gathering: Record


def to_json(value: Any) -> Any:
    """Make a trace JSON: counters become lists of key and count."""
    if isinstance(value, Counter):
        return [[*key, times] for key, times in value.items()]
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    return value


def from_json(content: dict[str, Any]) -> StageTrace:
    """Read what `to_json` made."""

    def record(item: dict[str, Any]) -> Record:
        counters = {
            name: Counter({tuple(key): times for *key, times in item[name]})
            for name in ("work", "collectives")
        }
        return Record(**{**item, **counters})

    chunks = [
        ChunkTrace(record(chunk["forward"]), record(chunk["backward"]), chunk["left"])
        for chunk in content["chunks"]
    ]
    phases = {name: record(content[name]) for name in ("reduction", "gathering")}
    return StageTrace(**{**content, "chunks": chunks, **phases})
