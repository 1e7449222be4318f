"""`msllm show-model`: one model's shape, parameters, recipes, and the command that trains it."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from msllm.cli.list_models import aligned, choice, length, short

if TYPE_CHECKING:
    from msllm.models.architecture import Architecture
    from msllm.models.catalog import ModelCard, Recipe, TuneRecipe
    from msllm.models.counts import ParameterCount

EPILOG = """Examples:

  msllm show-model qwen3-8b

  msllm show-model ./my-model --format json
"""
FORMATS = ("table", "json")
_RECIPE_COLUMNS = (
    "seq", "backend", "cluster", "tp", "pp", "vpp", "ep", "cp", "micro", "global", "lr",
    "recompute", "dtype", "cert",
)  # fmt: skip
_TUNE_COLUMNS = (
    "task", "method", "rank", "seq", "cluster", "tp", "pp", "ep", "cp", "micro", "global", "lr",
)  # fmt: skip
_ALWAYS = {"theta", "norm", "norm_eps", "activation", "tie_word_embeddings"}
"""Fields shown even where they have their defaults."""


def show_model(
    model: Annotated[
        str,
        typer.Argument(metavar="NAME_OR_DIR", help="catalog name, or a folder with a config.json"),
    ],
    format: Annotated[str, typer.Option(help="table or json", metavar="NAME")] = "table",
) -> None:
    """Show a model's shape, size and recipes."""
    format = choice("--format", format, FORMATS) or "table"
    found = subject(model)
    if format == "json":
        sys.stdout.write(json.dumps(_record(found), indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(_page(found)) + "\n")


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is shown; a card in the catalog may be all that is known of it."""

    name: str
    card: ModelCard | None
    config: dict[str, Any] | None = None
    architecture: Architecture | None = None


def subject(name: str) -> Subject:
    """Find a model as `pretrain` would, and also one whose shape is not known.

    Raises:
        InputError: There is no such model, or its config cannot be read.
    """
    from msllm.models.catalog import catalog
    from msllm.models.resolve import resolve_model

    card = catalog().find(name)
    if card is not None and card.config is None:
        return Subject(card.name, card)
    model = resolve_model(name)
    return Subject(model.name, model.card, model.config, model.architecture)


def _page(model: Subject) -> list[str]:
    card = model.card
    blocks = [_head(model)]
    if model.architecture is None:
        blocks.append(["shape: not published, see the notes"])
    else:
        blocks.append(["architecture", *_pairs(described(model.architecture))])
        blocks.append(["parameters", *_parameters(_count(model.architecture))])
    if card and card.recipes:
        blocks.append(["recipes", *_indented(_recipe_rows(card))])
    if card and card.tune:
        blocks.append(["tuning recipes", *_indented(_tune_rows(card.tune))])
    if card and card.notes:
        blocks.append(["notes", *(f"  - {note}" for note in card.notes)])
    blocks.append(_training(model))
    return [line for block in blocks for line in (*block, "")][:-1]


def _head(model: Subject) -> list[str]:
    card = model.card
    lines = [model.name]
    if card is None:
        return [*lines, *_pairs({"support": _support(model)})]
    hub = card.repositories
    guess = " (guessed)" if hub.modelscope_guessed else ""
    facts = {
        "family": card.family,
        "category": card.category,
        "support": card.support,
        "aliases": ", ".join(card.aliases),
        "Hugging Face": hub.huggingface or "",
        "ModelScope": f"{hub.modelscope}{guess}" if hub.modelscope else "",
    }
    return [*lines, *_pairs({name: fact for name, fact in facts.items() if fact})]


def described(arch: Architecture) -> dict[str, Any]:
    """What an architecture says, parts written as `part.field`; most defaults are left out."""
    facts: dict[str, Any] = {}
    for field in fields(arch):
        value = getattr(arch, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            inner = {f.name: getattr(value, f.name) for f in fields(value) if _differs(value, f)}
            facts.update({f"{field.name}.{name}": v for name, v in inner.items()})
        elif _differs(arch, field):
            facts[field.name] = value
    return facts


def _differs(owner: Any, field: Any) -> bool:
    if field.name in _ALWAYS or field.default is MISSING:
        return True
    return bool(getattr(owner, field.name) != field.default)


def _count(arch: Architecture) -> ParameterCount:
    from msllm.models.counts import parameters

    return parameters(arch)


def _parameters(count: ParameterCount) -> list[str]:
    rows = [(item, f"{n:,}", f"{100 * n / count.total:.1f} %") for item, n in count.items.items()]
    rows.append(("total", f"{count.total:,}", short(count.total)))
    if count.active != count.total:
        rows.append(("active a token", f"{count.active:,}", short(count.active)))
    if count.mtp:
        rows.append(("multi-token prediction, beside", f"{count.mtp:,}", short(count.mtp)))
    return _indented(aligned(rows, gap=2, right={1, 2}))


def _pairs(facts: dict[str, Any]) -> list[str]:
    width = max(map(len, facts))
    return [f"  {name.ljust(width)}  {_text(value)}" for name, value in facts.items()]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return _runs(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def _runs(values: tuple[Any, ...]) -> str:
    """A sequence with runs of equal values written once: mamba x3, attention."""
    runs: list[tuple[Any, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return ", ".join(str(v) if n == 1 else f"{v} x{n}" for v, n in runs)


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _recipe_rows(card: ModelCard) -> list[str]:
    rows = [_RECIPE_COLUMNS, *[_recipe_row(recipe) for recipe in card.recipes]]
    lines = aligned(rows, gap=2)
    differing = [r for r in card.recipes if r.cluster != (r.nodes, r.npus)]
    for recipe in differing:
        nodes, npus = recipe.cluster
        lines.append(
            f"the sizes of {length(recipe.seq_length)} are for {nodes}x{npus}, "
            f"{recipe.nodes}x{recipe.npus} is recommended"
        )
    return lines


def _recipe_row(r: Recipe) -> tuple[str, ...]:
    return (
        length(r.seq_length),
        r.backend,
        f"{r.nodes}x{r.npus}",
        *map(str, (r.tp, r.pp, r.vpp, r.ep, r.cp)),
        *_batch(r),
        r.recompute,
        r.dtype or "-",
        r.certification or "-",
    )


def _tune_rows(recipes: tuple[TuneRecipe, ...]) -> list[str]:
    rows = [
        (
            r.task,
            r.method,
            str(r.lora_rank or "-"),
            length(r.seq_length) if r.seq_length else "-",
            f"{r.nodes or '?'}x{r.npus or '?'}",
            *map(str, (r.tp, r.pp, r.ep, r.cp)),
            *_batch(r),
        )
        for r in recipes
    ]
    return aligned([_TUNE_COLUMNS, *rows], gap=2)


def _batch(r: Recipe | TuneRecipe) -> tuple[str, str, str]:
    return str(r.micro_batch or "-"), str(r.global_batch or "-"), f"{r.lr:g}" if r.lr else "-"


def _support(model: Subject) -> str:
    from msllm.models.support import support

    return support(model.architecture)


def _training(model: Subject) -> list[str]:
    """The command that trains the model, or why msllm does not."""
    reasons = untrained(model)
    if reasons:
        return ["msllm does not train it yet", *(f"  - {reason}" for reason in reasons)]
    return ["train it", *_indented(_explained_commands(model))]


def _explained_commands(model: Subject) -> list[str]:
    """Each command, behind what it still lacks if this version would refuse it."""
    lines = []
    for command, lacks in zip(commands(model), _lacks(model), strict=True):
        if lacks:
            lines.append(f"# not in this version, as {' and '.join(lacks)} is missing:")
        lines.append(f"# {command}" if lacks else command)
    return lines


def _lacks(model: Subject) -> list[list[str]]:
    """What this version lacks for each of the commands."""
    from msllm.models.support import missing_for

    recipes = model.card.recipes if model.card else ()
    return [missing_for(recipe.trained_on, recipe.cp) for recipe in recipes] or [[]]


def untrained(model: Subject) -> list[str]:
    """Why msllm does not train the model; empty if it does."""
    from msllm.models.support import proven_levels, untrained_features

    if model.architecture is None:
        return ["its shape is not known"]
    kind = model.architecture.model_type
    if kind not in proven_levels():
        return [f"no test proves training of {kind} yet"]
    missing = untrained_features(model.architecture)
    return [f"training tests of {kind} do not cover: {feature}" for feature in missing]


def commands(model: Subject) -> list[str]:
    """The command of each recipe; without recipes, of one machine.

    Optimizer settings are the recipe's wherever no flag says otherwise.
    """
    recipes = model.card.recipes if model.card else ()
    start = f"msllm pretrain --model {shlex.quote(model.name)} --data DATA --tokenizer TOKENIZER"
    return [f"{start} {_flags(recipe)}" for recipe in recipes] or [f"{start} --npus 8"]


def _flags(r: Recipe) -> str:
    nodes, npus = r.cluster
    flags = {
        "backend": r.trained_on if r.trained_on != "mcore" else None,
        "nodes": nodes,
        "npus": npus,
        **{name: getattr(r, name) for name in ("tp", "pp", "vpp", "ep", "cp")},
        "seq-length": r.script_seq_length or r.seq_length,
        "micro-batch": r.micro_batch,
        "global-batch": r.global_batch,
        "lr": f"{r.lr:g}" if r.lr else None,
        "dtype": "fp32" if r.dtype == "fp32" else None,
    }
    plain = {"nodes": 1, "tp": 1, "pp": 1, "vpp": 1, "ep": 1, "cp": 1}
    given = {name: value for name, value in flags.items() if value not in (None, plain.get(name))}
    words = [f"--{name} {value}" for name, value in given.items()]
    if r.etp > 1:
        words.append(f"--set layout.etp={r.etp}")
    if r.recompute != "none":
        words.append(f"--set train.recompute={r.recompute}")
    return " ".join(words)


def _record(model: Subject) -> dict[str, Any]:
    card, arch = model.card, model.architecture
    count = _count(arch) if arch else None
    reasons = untrained(model)
    return {
        "name": model.name,
        "family": card.family if card else None,
        "category": card.category if card else None,
        "support": _support(model),
        "aliases": list(card.aliases) if card else [],
        "repositories": asdict(card.repositories) if card else {},
        "parameters": count and count.total,
        "active_parameters": count and count.active,
        "mtp_parameters": count and count.mtp,
        "breakdown": dict(count.items) if count else None,
        "architecture": asdict(arch) if arch else None,
        "config": model.config,
        "recipes": [asdict(recipe) for recipe in card.recipes] if card else [],
        "tune": [asdict(recipe) for recipe in card.tune] if card else [],
        "notes": list(card.notes) if card else [],
        "untrained": reasons,
        "commands": [
            {"command": command, "missing": lacks}
            for command, lacks in zip(commands(model), _lacks(model), strict=True)
            if not reasons
        ],
    }
