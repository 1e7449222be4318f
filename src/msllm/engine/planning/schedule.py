"""The order of a stage's work under one-forward-one-backward, interleaved or not: pure integers.

arXiv:2104.04473, section 2.2; the warm-up counts are Megatron-core's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msllm.engine.layout import Layout
from msllm.engine.planning.records import ChunkTrace

Turn = tuple[bool, int]
"""Whether it is a forward pass, and of which chunk of the stage."""


def turns(layout: Layout, stage: int, count: int) -> Iterator[Turn]:
    """Give a stage's forward and backward passes of `count` micro-batches in their order."""
    total = count * layout.vpp
    if layout.vpp == 1:
        ahead = min(layout.pp - stage - 1, total)
    else:
        ahead = min(2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp, total)
    for index in range(ahead):
        yield True, _chunk(layout, index)
    for index in range(total - ahead):
        yield True, _chunk(layout, index + ahead)
        yield False, layout.vpp - 1 - _chunk(layout, index)
    for index in range(total - ahead, total):
        yield False, layout.vpp - 1 - _chunk(layout, index)


def _chunk(layout: Layout, index: int) -> int:
    """Chunk of the stage's `index`th pass: `pp` micro-batches each before the next chunk."""
    return index // layout.pp % layout.vpp if layout.vpp > 1 else 0


def most_held(
    chunks: Sequence[ChunkTrace], layout: Layout, stage: int, count: int
) -> tuple[int, int]:
    """Most bytes of a step's activations: those kept between passes, and those with a pass.

    Args:
        chunks: The stage's chunks.
        layout: The pipeline.
        stage: Which stage.
        count: Micro-batches of a step.
    """
    # what follows the first rounds repeats them
    count = min(count, 4 * layout.pp)
    held = left = most_kept = most = 0
    for forward, index in turns(layout, stage, count):
        chunk = chunks[index]
        if forward:
            most, left = max(most, held + left + chunk.forward_peak), 0
            held += chunk.kept
            most_kept = max(most_kept, held)
        else:
            held -= chunk.kept
            most, left = max(most, held + chunk.backward_peak), chunk.left
    return most_kept, most


def step_seconds(stages: Sequence[float], count: int, vpp: int, send: float) -> tuple[float, float]:
    """Seconds of a step's pipeline, and the share of them in which the slowest stage waits.

    Args:
        stages: Seconds of each stage for one micro-batch, forward and backward.
        count: Micro-batches.
        vpp: Chunks a stage: they divide the time to fill and drain the pipeline.
        send: Seconds to send a micro-batch to the next stage, once.
    """
    slowest = max(stages)
    hops = 2 * send if len(stages) > 1 else 0.0
    busy = count * (slowest + hops * vpp)
    fill = (sum(stages) - slowest) / vpp + (len(stages) - 1) * hops
    return busy + fill, fill / (busy + fill)
