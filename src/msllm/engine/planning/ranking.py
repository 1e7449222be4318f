"""Which layout of a cluster is best: formulas choose a few, traces rank them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from msllm.config import RunConfig
from msllm.engine.planning import search
from msllm.engine.planning.plan import Plan, make_plan
from msllm.engine.planning.records import StageTrace
from msllm.engine.planning.search import Candidate
from msllm.errors import InputError
from msllm.models.architecture import Architecture
from msllm.models.device_models import DeviceModel

SHOWN = 5
"""Layouts that are shown, the recipe's among them."""
AT_ONCE = 2
"""Layouts that are traced at the same time."""
MARGIN = 0.97
"""Share of a device's memory that a layout may need by formulas to be worth a trace."""

TraceRun = Callable[[RunConfig, int], StageTrace]
"""Traces a stage of a run."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A layout that was traced.

    Attributes:
        name: Its sizes in words.
        plan: Its plan; of the best one for all stages, of the others from two traced stages.
        recipe: Whether it is the catalog's.
    """

    name: str
    plan: Plan
    recipe: bool = False


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result of a search.

    Attributes:
        tried: Number of legal layouts.
        fitting: How many of them fit by formulas.
        best: The layouts that were traced, best first.
        rejected: (change, why) of the best layout's neighbours.
        recipe_problem: Why the recipe's layout is not among the best, if it is not legal here.
    """

    tried: int
    fitting: int
    best: tuple[Ranked, ...]
    rejected: tuple[tuple[str, str], ...]
    recipe_problem: str | None = field(default=None)


def rank(
    run: RunConfig,
    architecture: Architecture,
    device: DeviceModel,
    recomputes: tuple[str, ...],
    recipe: RunConfig | None,
    trace: TraceRun,
    imbalance: float = 1.0,
) -> Ranking:
    """Search the layouts of a run's devices.

    Args:
        run: The run; its parallel sizes don't count.
        architecture: Its model.
        device: The device model.
        recomputes: Which recomputes are tried.
        recipe: The run with the catalog's sizes, if it has any.
        trace: Traces a stage of a run; called from `AT_ONCE` threads.
        imbalance: Tokens of the busiest rank's experts over the mean.

    Raises:
        InputError: The model does not fit the cluster, or no layout is legal.
    """
    legal = list(search.candidates(run, architecture, device, recomputes))
    fitting = [each for each in legal if each.total <= MARGIN * device.memory]
    fitting.sort(key=lambda each: -each.tokens_per_second)
    if not fitting:
        raise _too_large(run, architecture, device, legal)
    own = None if recipe is None else search.candidate(recipe, architecture, device)
    chosen = fitting[: SHOWN - isinstance(own, Candidate)]
    if isinstance(own, Candidate) and all(not _same(own, each) for each in chosen):
        chosen.append(own)

    def planned(each: Candidate, rough: bool) -> Plan:
        return make_plan(
            architecture, each.layout, each.run, device,
            lambda stage: trace(each.run, stage), imbalance, rough,
        )  # fmt: skip

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(zip(pool.map(lambda each: planned(each, True), chosen), chosen, strict=True))
    found.sort(key=lambda pair: (not pair[0].fits, -pair[0].tokens_per_second))
    best, first = found[0][1], planned(found[0][1], False)
    ranked = [
        Ranked(
            each.name,
            first if each is best else plan,
            isinstance(own, Candidate) and _same(own, each),
        )
        for plan, each in found
    ]
    return Ranking(
        len(legal), len(fitting), tuple(ranked),
        tuple(_reasons(best, architecture, device)),
        own if isinstance(own, str) else None,
    )  # fmt: skip


def _same(one: Candidate, other: Candidate) -> bool:
    return one.layout == other.layout and one.run.train.recompute == other.run.train.recompute


def _too_large(
    run: RunConfig, architecture: Architecture, device: DeviceModel, legal: list[Candidate]
) -> InputError:
    world = run.launch.world_size
    if not legal:
        return InputError(
            f"no layout of {world} devices is legal for {run.model} with these settings",
            f"--nodes {run.launch.nodes} --npus {run.launch.npus}",
            "leave out --global-batch, or give the sizes you want to see what is wrong with them",
        )
    least = min(legal, key=lambda each: each.total)
    needed = search.devices_needed(run, architecture, device)
    hint = f"it takes about {needed:,} of them" if needed else "no number of them would do"
    return InputError(
        f"{run.model} does not fit {world:,} x {device.name}: the thriftiest layout ({least.name}) "
        f"needs {least.total / 2**30:.1f} GiB of {device.memory / 2**30:.0f} GiB a device",
        f"--nodes {run.launch.nodes} --npus {run.launch.npus}",
        f"{hint}; or a shorter --seq-length",
    )


def _reasons(
    best: Candidate, architecture: Architecture, device: DeviceModel
) -> list[tuple[str, str]]:
    """Why each layout one change away lost, by formulas."""
    found = []
    for change, run in search.neighbours(best.run):
        other = search.candidate(run, architecture, device)
        if isinstance(other, str):
            found.append((change, f"not legal: {other}"))
        elif other.total > MARGIN * device.memory:
            size = f"{other.total / 2**30:.1f} of {device.memory / 2**30:.0f} GiB"
            found.append((change, f"does not fit: about {size}"))
        else:
            found.append((change, _slower(best, other)))
    return found


def _slower(best: Candidate, other: Candidate) -> str:
    """What a layout spends more time on."""
    ratio = other.tokens_per_second / best.tokens_per_second
    if ratio >= 1:
        return f"about as fast by formulas ({ratio - 1:+.0%})"
    names = {**best.seconds, **other.seconds}
    scale = sum(best.seconds.values()) / ratio / sum(other.seconds.values())
    more = {n: other.seconds.get(n, 0) * scale - best.seconds.get(n, 0) for n in names}
    worst = max(more, key=lambda name: more[name])
    again = other.run.train.recompute == "full" != best.run.train.recompute
    words = {
        "compute": "recomputes" if again else "a longer slowest stage",
        "bubble": "longer pipeline bubble",
        "tp": "more tensor parallel traffic",
        "ep": "more expert traffic",
        "dp": "more data parallel traffic",
    }
    return f"{1 - ratio:.0%} slower by formulas: {words[worst]}"
