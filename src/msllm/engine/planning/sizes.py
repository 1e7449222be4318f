"""Parallel sizes for a number of devices, where nobody gave any: the least that fits in memory.

Tensor parallelism first and only inside a machine, where links are fast; then the pipeline.
Experts are spread as far as data parallel ranks go, only if the model does not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

from msllm.config import RunConfig
from msllm.engine.layout import Layout, divides
from msllm.engine.planning import memory
from msllm.models.architecture import Architecture


def suggest_sizes(
    run: RunConfig, architecture: Architecture, fixed: set[str], kind: str, budget: int
) -> dict[str, int]:
    """Choose the parallel sizes that `fixed` does not name.

    Args:
        run: The run, with its sizes as far as they are fixed.
        architecture: Its model.
        fixed: Names among tp, pp, ep that stay as they are in `run`.
        kind: Kind of device.
        budget: Bytes that a device has.

    Returns:
        tp, pp and ep: the first legal ones that fit `budget`, else the legal ones that need least;
        empty if none are legal.
    """
    best: tuple[int, dict[str, int]] | None = None
    for sizes in _candidates(run, fixed):
        config = run.layout.model_copy(update=sizes)
        world = run.launch.world_size
        layout = Layout.from_world(config, world)
        if divides(config, world) or layout.problems(architecture):
            continue
        tried = run.model_copy(update={"layout": config})
        total = memory.estimate(architecture, layout, tried, kind).total
        if total <= budget:
            return sizes
        if best is None or total < best[0]:
            best = total, sizes
    return best[1] if best else {}


def divisors(number: int, largest: int) -> list[int]:
    """Those of `number` up to `largest`, rising."""
    return [d for d in range(1, min(number, largest) + 1) if number % d == 0]


def _candidates(run: RunConfig, fixed: set[str]) -> Iterator[dict[str, int]]:
    """List sizes from the least model parallelism to the most."""
    npus, world = run.launch.npus, run.launch.world_size
    ranges = {
        "tp": divisors(npus, npus),
        "pp": divisors(world, world),
        "ep": divisors(world, world),
    }
    for name in fixed & set(ranges):
        ranges[name] = [getattr(run.layout, name)]
    found = [(t, p, e) for t in ranges["tp"] for p in ranges["pp"] for e in ranges["ep"]]
    for t, p, e in sorted(found, key=lambda sizes: (sizes[0] * sizes[1] * sizes[2], *sizes[1:])):
        if world % (t * p) == 0 and world % (e * p) == 0:
            yield {"tp": t, "pp": p, "ep": e}
