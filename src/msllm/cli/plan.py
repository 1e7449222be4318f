"""`msllm plan`: what a run will need and how fast it will be, on any cluster, from any machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from msllm.cli.flags import RUN, ConfigFile, settings_of, with_flags
from msllm.errors import InputError, Problem

if TYPE_CHECKING:
    from msllm.cli.settings import Resolved
    from msllm.config import RunConfig
    from msllm.engine.planning.ranking import TraceRun
    from msllm.engine.planning.tracer import Tracers
    from msllm.models.architecture import Architecture
    from msllm.models.device_models import DeviceModel

EPILOG = """Examples:

  msllm plan --model deepseek-v3 --nodes 64 --npus 8

  msllm plan --model qwen3-8b --nodes 1 --npus 8 --tp 4 --device-model Ascend910B4

  msllm plan --model qwen3-30b-a3b --nodes 2 --npus 8 --ep 8 --imbalance 1.3 --format json
"""

PARALLEL_SIZES = ("tp", "pp", "vpp", "pp_layout", "cp", "ep", "etp")
FILLED = ("recipe", "derived", "default")
"""How the sources begin of settings that nobody gave."""


@with_flags
def plan(
    *,
    config: ConfigFile = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE...",
            help="any setting by name, such as train.recompute=full",
            rich_help_panel=RUN,
        ),
    ] = None,
    device_model: Annotated[
        str,
        typer.Option(metavar="NAME", help="accelerator to plan for", rich_help_panel=RUN),
    ] = "Ascend910B2",
    imbalance: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="tokens of the busiest rank's experts over the mean",
            rich_help_panel=RUN,
        ),
    ] = 1.0,
    format_: Annotated[
        str,
        typer.Option("--format", metavar="table|json", help="output", rich_help_panel=RUN),
    ] = "table",
    **flags: Any,
) -> None:
    """Plan a run: memory, traffic and speed by layout, without devices."""
    from msllm.cli import recipe, settings
    from msllm.models.device_models import device_model as find

    device = find(device_model)
    resolved = settings.resolve(
        settings_of(flags), assignments or [], config, recipe.fill(lambda _: device.kind)
    )
    searched = not any(_given(resolved, f"layout.{name}") for name in PARALLEL_SIZES)
    architecture = _checked(resolved, device, searched, imbalance, format_)
    from msllm.engine.planning.ranking import AT_ONCE
    from msllm.engine.planning.tracer import Tracers

    with Tracers(device.kind, AT_ONCE if searched else 1) as tracers:
        work = _search if searched else _exact
        work(resolved, architecture, device, imbalance, format_, tracers)


def _checked(
    resolved: Resolved, device: DeviceModel, searched: bool, imbalance: float, format_: str
) -> Architecture:
    """Refuse what training would refuse, and what is no plan."""
    from msllm.engine import preflight

    run = resolved.config
    architecture, found = preflight.check_shape(run, device.kind)
    if searched:  # then the sizes are not the user's, and others are tried
        found = list(preflight.check_model(run, architecture)) if architecture else found
    problems = [*resolved.problems, *found]
    if run.device not in ("auto", device.kind):
        problems.append(
            Problem(
                f"{device.name} is no {run.device} device",
                f"--device {run.device}",
                "leave out --device; `msllm pretrain --dry-run` estimates runs on the CPU",
            )
        )
    if imbalance < 1:
        problems.append(Problem(f"imbalance is {imbalance}, but must be at least 1", "--imbalance"))
    if format_ not in ("table", "json"):
        problems.append(Problem(f"unknown format {format_!r}", "--format", "use table or json"))
    if problems or architecture is None:
        raise InputError(problems)
    return architecture


def _given(resolved: Resolved, path: str) -> bool:
    """Whether the user gave a setting, on the command line or in a file."""
    return not resolved.sources[path].startswith(FILLED)


def _exact(
    resolved: Resolved,
    architecture: Architecture,
    device: DeviceModel,
    imbalance: float,
    format_: str,
    tracers: Tracers,
) -> None:
    from msllm.cli import plan_tables
    from msllm.engine.layout import Layout
    from msllm.engine.planning.memory import three_ways_down
    from msllm.engine.planning.plan import as_json, make_plan

    run = resolved.config
    layout = Layout.from_world(run.layout, run.launch.world_size)
    found = make_plan(
        architecture, layout, run, device, lambda s: tracers.stage(run, s, imbalance), imbalance
    )
    if format_ == "json":
        print(json.dumps({"model": run.model, **as_json(found)}, indent=2))
    else:
        plan_tables.show_plan(run.model, found)
    if not found.fits and not run.launch.force:
        need, have = found.fullest.total / 2**30, device.memory / 2**30
        ways = "; ".join(three_ways_down(run, architecture, layout, device.kind))
        raise InputError(
            f"needs {need:.1f} GiB a device, and {device.name} has {have:.0f} GiB",
            f"stage {found.fullest.stage}",
            f"{ways}; or leave out the sizes to have them searched",
        )


def _search(
    resolved: Resolved,
    architecture: Architecture,
    device: DeviceModel,
    imbalance: float,
    format_: str,
    tracers: Tracers,
) -> None:
    from msllm.cli import plan_tables
    from msllm.engine.planning.ranking import rank

    run = resolved.config
    recomputes = ("none", "full")
    if _given(resolved, "train.recompute"):
        recomputes = (run.train.recompute,)  # type: ignore[assignment]
    trace: TraceRun = lambda tried, stage: tracers.stage(tried, stage, imbalance)  # noqa: E731
    ranking = rank(run, architecture, device, recomputes, _recipe(resolved), trace, imbalance)
    if format_ == "json":
        print(json.dumps(plan_tables.ranking_json(run.model, ranking), indent=2))
    else:
        plan_tables.show_ranking(run.model, ranking)


def _recipe(resolved: Resolved) -> RunConfig | None:
    """The run with the sizes and recompute of the catalog's recipe."""
    from msllm.cli.recipe import SIZES, choose_recipe
    from msllm.cli.settings import Setting
    from msllm.engine.planning.search import with_sizes
    from msllm.models.resolve import resolve_model

    run = resolved.config
    card = resolve_model(run.model).card
    given = {path: Setting(None, "") for path in resolved.sources if _given(resolved, path)}
    recipe = choose_recipe(card, run, given) if card else None
    if recipe is None:
        return None
    recompute = run.train.recompute if "train.recompute" in given else recipe.recompute
    return with_sizes(run, recompute, **{name: getattr(recipe, name) for name in SIZES})
