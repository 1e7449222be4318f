"""A plan in tables that a person can decide from, and a search as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from msllm.engine.planning.plan import Plan, StagePlan
    from msllm.engine.planning.ranking import Ranked, Ranking

GIB = 2**30
WIDTH = 150
"""Columns of a table that goes to a file."""


def show_plan(model: str, plan: Plan) -> None:
    """Show one layout: memory by stage, time, traffic, and what all this assumes."""
    console = _console()
    _say(console, f"{model} on {plan.layout.world_size} x {plan.device.name}: {_sizes(plan)}")
    console.print(_memory(plan))
    console.print(_time(plan))
    if plan.collectives:
        console.print(_traffic(plan))
    for line in (*_figures(plan), *_assumptions(plan)):
        _say(console, line)


def show_ranking(model: str, ranking: Ranking) -> None:
    """Show the best layouts, why the best one's neighbours lost, and its plan."""
    console = _console()
    best = ranking.best[0].plan
    _say(
        console,
        f"{model} on {best.layout.world_size} x {best.device.name}: {ranking.tried} legal layouts, "
        f"{ranking.fitting} fit, {len(ranking.best)} traced",
    )
    console.print(_layouts(ranking.best))
    if ranking.recipe_problem:
        _say(console, f"the catalog's recipe is not legal here: {ranking.recipe_problem}")
    if ranking.rejected:
        console.print(_rows(("instead of it", "why not"), ranking.rejected, "the best one's kin"))
    show_plan(model, best)


def ranking_json(model: str, ranking: Ranking) -> dict[str, Any]:
    """A search for programs."""
    from msllm.engine.planning.plan import as_json

    return {
        "model": model,
        "tried": ranking.tried,
        "fitting": ranking.fitting,
        "layouts": [
            {"name": each.name, "recipe": each.recipe, **as_json(each.plan)}
            for each in ranking.best
        ],
        "recipe_problem": ranking.recipe_problem,
        "rejected": [{"change": change, "why": why} for change, why in ranking.rejected],
    }


def _console() -> Console:
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else WIDTH, highlight=False)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def _rows(
    titles: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None, left: int = 2
) -> Table:
    """A table whose columns after the first `left` are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(titles):
        table.add_column(name, justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _sizes(plan: Plan) -> str:
    sizes = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
    named = " ".join(f"{name} {getattr(plan.layout, name)}" for name in sizes)
    train = plan.run.train
    samples = plan.tokens // plan.run.data.seq_length
    return (
        f"{named}, recompute {train.recompute}, {samples} samples of "
        f"{plan.run.data.seq_length} tokens a step"
    )


def _memory(plan: Plan) -> Table:
    from msllm.engine.planning.plan import layers_text

    names = list(plan.stages[0].items)
    rows = []
    for stage in plan.stages:
        mark = " *" if stage is plan.fullest and len(plan.stages) > 1 else ""
        rows.append(
            (
                f"{stage.stage}{mark}", layers_text(stage.layers), f"{stage.parameters / 1e9:.2f}",
                *(f"{stage.items[name] / GIB:.2f}" for name in names),
                f"{stage.total / GIB:.2f}",
            )
        )  # fmt: skip
    short = {"main parameters": "main param.", "optimizer state": "optimizer",
             "working memory": "working"}  # fmt: skip
    titles = ("stage", "layers", "param. (B)", *(short.get(n, n) for n in names), "peak")
    have = plan.device.memory / GIB
    note = "fits" if plan.fits else "DOES NOT FIT"
    return _rows(titles, rows, f"memory of a device, GiB of {have:.0f}: {note}")


def _time(plan: Plan) -> Table:
    total = plan.step_seconds
    rows = [(n, f"{took:.3f}", f"{took / total:.1%}") for n, took in plan.seconds.items()]
    rows.append(("step", f"{total:.3f}", "100.0%"))
    return _rows(("time of a step", "seconds", "share"), rows, left=1)


def _traffic(plan: Plan) -> Table:
    found = sorted(plan.collectives.items(), key=lambda item: -item[1])
    rows = [(group, name, f"{size / GIB:.3f}") for (name, group), size in found if size >= 2**20]
    return _rows(("group", "collective", "GiB a step"), rows, "traffic of a device")


def _figures(plan: Plan) -> list[str]:
    flops, speed = _busiest(plan).flops, plan.tokens_per_second
    return [
        f"{speed:,.0f} tokens/s, {speed / plan.layout.world_size:,.0f} a device; "
        f"MFU {plan.mfu:.1%}; {flops / 1e12:,.0f} TFLOP a device and step; "
        f"pipeline bubble {plan.bubble:.1%}"
    ]


def _busiest(plan: Plan) -> StagePlan:
    return max(plan.stages, key=lambda stage: stage.flops)


def _assumptions(plan: Plan) -> list[str]:
    device, share = plan.device, plan.device.efficiency
    near, far = device.node_bandwidth / 1e9, device.network_bandwidth / 1e9
    lines = [
        f"assumed of {device.name}: {device.peak(plan.run.dtype) / 1e12:.0f} TFLOP/s, HBM "
        f"{device.memory_bandwidth / 1e12:.1f} TB/s, links {near:.0f} GB/s in a machine and "
        f"{far:.0f} GB/s beyond; of these kernels reach {share.matmul:.0%} (products), "
        f"{share.attention:.0%} (attention), {share.memory:.0%} (memory), {share.links:.0%} "
        "(links): not measured"
    ]
    if any(group == "ep" for _, group in plan.collectives):
        lines.append(
            f"experts' tokens are taken as balanced, the busiest rank's {plan.imbalance:.2f} "
            "times the mean"
        )
    return lines


def _layouts(best: Iterable[Ranked]) -> Table:
    rows = [
        (
            each.name, "recipe" if each.recipe else "",
            f"{each.plan.fullest.total / GIB:.1f}" + ("" if each.plan.fits else " !"),
            f"{each.plan.step_seconds:.2f}", f"{each.plan.tokens_per_second:,.0f}",
            f"{each.plan.mfu:.1%}", f"{each.plan.bubble:.1%}",
        )
        for each in best
    ]  # fmt: skip
    titles = ("layout", "", "GiB", "step s", "tokens/s", "MFU", "bubble")
    return _rows(titles, rows, "layouts, best first")
