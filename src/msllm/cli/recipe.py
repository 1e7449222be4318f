"""What a run's settings are where nobody gave them: an earlier part, the recipe, derived sizes.

A recipe's parallel sizes and batches belong to its cluster: they are taken for a job of that many
devices, and for any other number legal sizes are derived.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable

from msllm.cli.settings import Setting, Settings
from msllm.config import LayoutConfig, RunConfig
from msllm.errors import InputError
from msllm.models.architecture import Architecture
from msllm.models.catalog import ModelCard, Recipe
from msllm.models.resolve import resolve_model

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")
BUDGET = {"npu": 56 << 30, "cuda": 72 << 30}
"""Memory of a device that sizes are derived for: less than the usual 64 and 80 GiB."""


def fill(kind: Callable[[str], str]) -> Callable[[RunConfig, Settings], Settings]:
    """Make the filler for `settings.resolve`.

    Args:
        kind: Gives the kind of device that `--device` means here.
    """

    def work(config: RunConfig, asked: Settings) -> Settings:
        device = kind(config.device)
        earlier = _from_run(config, asked)
        config, given = _with(config, earlier), asked | earlier
        filled = _from_scheduler(given)
        try:
            model = resolve_model(config.model)
        except InputError:
            return filled | earlier  # preflight says so, with all else that is wrong
        recipe = choose_recipe(model.card, config, given) if model.card else None
        if recipe is not None:
            filled |= _from_recipe(recipe, config, given | filled)
        if device == "cpu":
            filled["dtype"] = Setting("fp32", "derived (cpu: bf16 is slower there)")
        unsplit = not any(f"layout.{name}" in filled for name in (*SIZES, "pp_layout"))
        if unsplit and model.architecture is not None:
            filled |= _derive(config, model.architecture, given, filled, device)
        return filled | earlier

    return work


def choose_recipe(card: ModelCard, config: RunConfig, given: Settings) -> Recipe | None:
    """Choose among a model's recipes for the backend: the nearest in sequence length, in octaves.

    The first one where no length was given.
    """
    recipes = [r for r in card.recipes if r.trained_on == config.backend]
    if not recipes:
        return None
    if "data.seq_length" not in given:
        return recipes[0]
    length = config.data.seq_length
    return min(recipes, key=lambda r: abs(math.log2(_length(r) / length)))


def _length(recipe: Recipe) -> int:
    return recipe.script_seq_length or recipe.seq_length


def _from_run(config: RunConfig, asked: Settings) -> Settings:
    """Take what the run in `--out`, which goes on, was started with."""
    from msllm.engine.run_identity import kept

    source = f"run.yaml of {config.out}"
    return {p: Setting(v, source) for p, v in kept(config).items() if p not in asked}


def _from_scheduler(given: Settings) -> Settings:
    """Take the number of machines from Slurm, Kubernetes or torchrun, if it says."""
    from msllm.engine.placement import scheduled

    found = scheduled(os.environ)
    if "launch.nodes" in given or found is None or not found.nodes:
        return {}
    return {"launch.nodes": Setting(found.nodes, found.source)}


def _from_recipe(recipe: Recipe, config: RunConfig, known: Settings) -> Settings:
    """Take what the recipe says, except sizes and batches of another cluster."""
    source = f"recipe ({recipe.trained_on}, {_length(recipe)} tokens)"
    values: dict[str, object] = {
        "data.seq_length": _length(recipe),
        **_training(recipe, config, known),
    }
    nodes, npus = recipe.cluster
    asked = {name: int(known[f"launch.{name}"].value) for name in ("nodes", "npus")
             if f"launch.{name}" in known}  # fmt: skip
    if asked.get("nodes", nodes) * asked.get("npus", npus) == nodes * npus:
        values |= {"launch.nodes": nodes, "launch.npus": npus} | _cluster(recipe, known)
    values |= _batches(recipe, config, values, known)
    return {path: Setting(value, source) for path, value in values.items() if value is not None}


def _training(recipe: Recipe, config: RunConfig, known: Settings) -> dict[str, object]:
    """Take the optimizer's settings; the learning rate's end and warm-up in proportion."""
    steps = config.train.steps if "train.steps" in known else recipe.steps or 0
    total = config.train.decay_steps or steps
    warmup = recipe.warmup_steps
    if warmup is None and recipe.warmup_fraction is not None:
        warmup = round(recipe.warmup_fraction * total)
    if warmup is not None and warmup >= total:  # a trial of a few steps
        warmup = total // 2
    min_lr = recipe.min_lr
    if "train.lr" in known and min_lr is not None and recipe.lr:
        min_lr = config.train.lr * min_lr / recipe.lr
    return {
        "dtype": recipe.dtype if recipe.dtype != "fp16" else None,
        "train.steps": recipe.steps,
        "train.lr": recipe.lr,
        "train.min_lr": min_lr,
        "train.lr_schedule": recipe.lr_schedule,
        "train.warmup_steps": warmup,
        "train.weight_decay": recipe.weight_decay,
        "train.clip_grad": recipe.clip_grad,
        "train.beta1": recipe.beta1,
        "train.beta2": recipe.beta2,
    }


def _cluster(recipe: Recipe, known: Settings) -> dict[str, object]:
    """Take the parallel sizes, unless some were given: then they may not fit together."""
    given = [f"layout.{name}" in known for name in (*SIZES, "pp_layout")]
    sizes: dict[str, object] = {}
    if not any(given):
        sizes = {f"layout.{name}": getattr(recipe, name) for name in SIZES}
    if recipe.recompute != "none":
        sizes["train.recompute"] = recipe.recompute
        if recipe.recompute == "full" and recipe.recompute_method == "uniform":
            sizes["train.recompute_layers"] = recipe.recompute_layers
    return sizes


def _batches(
    recipe: Recipe, config: RunConfig, values: dict[str, object], known: Settings
) -> dict[str, object]:
    """Take the batches if they divide over the job's data parallel ranks."""
    cluster = {**values, **{path: known[path].value for path in known}}
    model = math.prod(_number(cluster, f"layout.{name}", 1) for name in ("tp", "pp", "cp"))
    world = _number(cluster, "launch.nodes", 1) * _number(cluster, "launch.npus", 1)
    micro = _number(known, "train.micro_batch", recipe.micro_batch or 1)
    samples = _number(known, "train.global_batch", recipe.global_batch or 0)
    if samples and samples % (micro * max(1, world // model)):
        return {}
    return {"train.micro_batch": recipe.micro_batch, "train.global_batch": recipe.global_batch}


def _number(values: dict[str, object] | Settings, path: str, default: int) -> int:
    value = values.get(path, default)
    if isinstance(value, Setting):
        value = value.value
    return int(value) if isinstance(value, int | str) and str(value).isdigit() else default


def _derive(
    config: RunConfig, architecture: Architecture, given: Settings, filled: Settings, kind: str
) -> Settings:
    """Choose the parallel sizes that are still open so that the model fits the devices."""
    from msllm.engine.planning.sizes import suggest_sizes

    run = _with(config, {path: s for path, s in filled.items() if path not in given})
    launch = run.launch
    fixed = {name for name in SIZES if f"layout.{name}" in given}
    if launch.world_size == 1 or _split_by_hand(config.layout, given):
        return {}
    if kind == "cpu":
        from msllm.engine import host_memory

        budget = host_memory.available() // launch.npus
    else:
        budget = BUDGET[kind]
    sizes = suggest_sizes(run, architecture, fixed, kind, budget)
    devices = f"derived ({launch.world_size} devices)"
    return {f"layout.{name}": Setting(size, devices) for name, size in _open(sizes, fixed)}


def _with(config: RunConfig, settings: Settings) -> RunConfig:
    """Set settings in a copy of the config."""
    content = config.model_dump()
    for path, setting in settings.items():
        section, _, name = path.rpartition(".")
        (content[section] if section else content)[name] = setting.value
    return RunConfig.model_validate(content)


def _open(sizes: dict[str, int], fixed: set[str]) -> Iterable[tuple[str, int]]:
    return ((name, size) for name, size in sizes.items() if name not in fixed)


def _split_by_hand(layout: LayoutConfig, given: Settings) -> bool:
    """Whether the pipeline was laid out by hand; then nothing is to be derived."""
    return layout.pp_layout is not None or "layout.vpp" in given
