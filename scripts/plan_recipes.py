"""Plan every recipe of the catalog at its own cluster: which fit a device of 64 GiB, and why not.

    python scripts/plan_recipes.py [--device-model NAME] [--trace] [--only TEXT]

By formulas (seconds), or with `--trace` by tracing (an hour). Models that msllm can't train yet are
planned by formulas only, where these know all of their parts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from msllm.config import RunConfig
from msllm.engine import preflight
from msllm.engine.layout import Layout, divides
from msllm.engine.planning import memory
from msllm.engine.planning.plan import make_plan
from msllm.engine.planning.tracer import Tracer
from msllm.errors import MsllmError
from msllm.models.catalog import ModelCard, Recipe, catalog
from msllm.models.device_models import DEFAULT, DeviceModel, device_model
from msllm.models.resolve import resolve_model

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A recipe's plan.

    Attributes:
        name: The model and the recipe's length.
        total: Bytes of the fullest device; None where its sizes are no layout at all.
        reason: Why it does not fit or can't be trained, else empty.
    """

    name: str
    total: int | None
    reason: str = ""


def recipes() -> Iterator[tuple[ModelCard, Recipe]]:
    """Those of the Mcore backend."""
    for card in catalog().models:
        for recipe in card.recipes:
            if recipe.trained_on == "mcore":
                yield card, recipe


def run_of(card: ModelCard, recipe: Recipe) -> RunConfig:
    """The run that a recipe describes, on its cluster."""
    nodes, npus = recipe.cluster
    train = {
        "micro_batch": recipe.micro_batch or 1,
        "global_batch": recipe.global_batch,
        "recompute": recipe.recompute,
    }
    if recipe.recompute == "full" and recipe.recompute_method == "uniform":
        train["recompute_layers"] = recipe.recompute_layers or 1
    return RunConfig.model_validate(
        {
            "model": card.name,
            "launch": {"nodes": nodes, "npus": npus},
            "layout": {name: getattr(recipe, name) for name in SIZES},
            "data": {"seq_length": recipe.script_seq_length or recipe.seq_length},
            "train": train,
        }
    )


def judge(
    card: ModelCard, recipe: Recipe, device: DeviceModel, tracer: Tracer | None = None
) -> Verdict:
    """Plan one recipe."""
    run = run_of(card, recipe)
    name = f"{card.name} {run.data.seq_length}"
    if card.config is None:
        return Verdict(name, None, "its shape is not published")
    architecture = resolve_model(card.name).architecture
    assert architecture is not None
    world = run.launch.world_size
    unfit = divides(run.layout, world)
    if unfit:
        return Verdict(name, None, unfit[0].problem)
    layout = Layout.from_world(run.layout, world)
    illegal = layout.problems(architecture)
    if illegal:
        return Verdict(name, None, illegal[0].problem)
    total = memory.estimate(architecture, layout, run, device.kind).total
    _, problems = preflight.check_shape(run, device.kind)
    if problems:
        return Verdict(name, total, problems[0].problem)
    if tracer is not None:
        found = make_plan(architecture, layout, run, device, lambda s: tracer.stage(run, s))
        total = found.fullest.total
    if total > device.memory:
        return Verdict(name, total, f"needs {total / 2**30:.1f} GiB of {device.memory_gib} GiB")
    return Verdict(name, total)


def main() -> None:
    """Print a line for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-model", default=DEFAULT)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--only", default="", help="part of a model's name")
    options = parser.parse_args()
    device = device_model(options.device_model)
    chosen = [(card, recipe) for card, recipe in recipes() if options.only in card.name]
    fit = 0
    tracer = Tracer(device.kind) if options.trace else None
    for card, recipe in chosen:
        try:
            found = judge(card, recipe, device, tracer)
        except MsllmError as error:
            found = Verdict(card.name, None, str(error))
            tracer = Tracer(device.kind) if options.trace else None
        fit += not found.reason
        size = "-" if found.total is None else f"{found.total / 2**30:.1f} GiB"
        print(f"{found.name:<40} {size:>12}  {found.reason or 'fits'}", flush=True)
    print(f"{fit} of {len(chosen)} fit {device.name}")


if __name__ == "__main__":
    main()
