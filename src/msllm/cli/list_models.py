"""`msllm list-models`: the catalog as a table, and as JSON, CSV or Markdown for others to read."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from msllm.errors import InputError, closest

if TYPE_CHECKING:
    from msllm.models.catalog import ModelCard, Recipe

EPILOG = """Examples:

  msllm list-models --category moe --max-params 50B

  msllm list-models --family Qwen3 --backend fsdp2

  msllm list-models --search coder --format json
"""
FORMATS = ("table", "json", "csv", "md")
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_ONE = {"models": "model", "recipes": "recipe", "families": "family"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)


def list_models(
    category: Annotated[
        str | None, typer.Option(help="dense, moe, linear or ssm", metavar="NAME")
    ] = None,
    family: Annotated[str | None, typer.Option(help="one family, such as Qwen3")] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="mcore or fsdp2: recipes that msllm trains on it", metavar="NAME"),
    ] = None,
    search: Annotated[
        str | None, typer.Option(help="text in a name, alias, family or repository")
    ] = None,
    max_params: Annotated[
        str | None, typer.Option(help="largest total, such as 10B or 500M", metavar="SIZE")
    ] = None,
    min_params: Annotated[
        str | None, typer.Option(help="smallest total, such as 1B", metavar="SIZE")
    ] = None,
    support: Annotated[
        str | None,
        typer.Option(help="listed, trains, self-referenced or proven", metavar="LEVEL"),
    ] = None,
    format: Annotated[str, typer.Option(help="table, json, csv or md", metavar="NAME")] = "table",
) -> None:
    """List the models that msllm knows.

    Each with its recipes, and with what msllm itself supports of it. Filters combine.
    """
    from msllm.models.catalog import BACKENDS, CATEGORIES, catalog
    from msllm.models.support import LEVELS

    known = catalog()
    format = choice("--format", format, FORMATS) or "table"
    keep = [
        _by_category(choice("--category", category, CATEGORIES)),
        _by_family(choice("--family", family, known.families)),
        _by_support(choice("--support", support, LEVELS)),
        _by_text(search),
        _by_size(_parameters("--min-params", min_params), _parameters("--max-params", max_params)),
    ]
    on = choice("--backend", backend, BACKENDS)
    found = [
        (card, recipes)
        for card in known.models
        if all(test(card) for test in keep)
        and (recipes := [r for r in card.recipes if on in (None, r.trained_on)])
    ]
    render = {"table": _table, "json": _json, "csv": _csv, "md": _markdown}[format]
    sys.stdout.write(render(found))


Found = Sequence[tuple["ModelCard", list["Recipe"]]]
Test = Callable[["ModelCard"], bool]


def choice(flag: str, value: str | None, choices: Iterable[str]) -> str | None:
    """A value among `choices`, whatever its case."""
    if value is None:
        return None
    known = list(choices)
    for choice in known:
        if choice.lower() == value.lower():
            return choice
    near = closest(value, known)
    raise InputError(
        f"unknown {flag.removeprefix('--')} {value!r}",
        where=f"{flag} {value}",
        hint=f"use {', '.join(known)}" if len(known) < 8 else f"closest are {', '.join(near)}",
    )


def _parameters(flag: str, value: str | None) -> float | None:
    """A number of parameters: 10B, 500M, 7000000000."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise InputError(
            f"{value!r} is not a number of parameters",
            where=f"{flag} {value}",
            hint="write 500M, 10B or 1.5T",
        )
    return float(match[1]) * _UNITS[match[2].upper()]


def _by_category(wanted: str | None) -> Test:
    return lambda card: wanted in (None, card.category)


def _by_family(wanted: str | None) -> Test:
    return lambda card: wanted in (None, card.family)


def _by_support(wanted: str | None) -> Test:
    return lambda card: wanted is None or card.support == wanted


def _by_text(text: str | None) -> Test:
    wanted = (text or "").lower()
    return lambda card: any(wanted in name.lower() for name in (*card.names, card.family))


def _by_size(least: float | None, most: float | None) -> Test:
    """Models of unknown size pass only where no bound is given."""
    if least is None and most is None:
        return lambda _: True

    def fits(card: ModelCard) -> bool:
        count = card.count
        return count is not None and (least or 0) <= count.total <= (most or float("inf"))

    return fits


def short(number: float | None) -> str:
    """1234567890 -> 1.23B; three digits, as models are named."""
    if number is None:
        return "-"
    for unit in ("T", "B", "M", "K"):
        scaled = number / _UNITS[unit]
        # what rounds to 1000 of a unit is 1 of the next
        if scaled >= 0.9995:
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{number:.0f}"


def length(tokens: int) -> str:
    """4096 -> 4K; lengths that are no multiple of 1024 stay as they are."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _unique(values: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(values))


HEADERS = (
    "family", "model", "params", "active", "category",
    "backend", "seq", "cluster", "cert", "support",
)  # fmt: skip


def _row(card: ModelCard, recipes: list[Recipe]) -> tuple[str, ...]:
    count = card.count
    active = count.active if count and count.active != count.total else None
    return (
        card.family,
        card.name,
        short(count.total if count else None),
        short(active),
        card.category,
        _unique(recipe.backend for recipe in recipes),
        _unique(length(recipe.seq_length) for recipe in recipes),
        _unique(f"{recipe.nodes}x{recipe.npus}" for recipe in recipes),
        _unique(recipe.certification or "-" for recipe in recipes),
        card.support,
    )


def _summary(found: Found) -> str:
    families = {card.family for card, _ in found}
    recipes = sum(len(recipes) for _, recipes in found)
    counts = {"models": len(found), "recipes": recipes, "families": len(families)}
    return ", ".join(
        f"{count} {_ONE[word] if count == 1 else word}" for word, count in counts.items()
    )


def _table(found: Found) -> str:
    """Aligned columns; narrower ones on a terminal that is not wide enough."""
    rows = [_row(card, recipes) for card, recipes in found]
    terminal = sys.stdout.isatty()
    lines = aligned([HEADERS, *rows], gap=2)
    if terminal and max(map(len, lines)) > shutil.get_terminal_size().columns:
        lines = _narrow(found)
    if terminal and _coloured():
        lines[0] = f"\033[1m{lines[0]}\033[0m"
    closing = _summary(found) if rows else f"{_summary(found)}: no model fits these filters"
    return "\n".join([*lines, "", closing]) + "\n"


def _coloured() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def aligned(rows: Sequence[Sequence[str]], gap: int, right: set[int] | None = None) -> list[str]:
    """Rows as lines with columns `gap` apart; those in `right`, or headed so, end together."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    numbers = right or {i for i, name in enumerate(rows[0]) if name in ("params", "active")}
    return [
        (" " * gap)
        .join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in rows
    ]


def _narrow(found: Found) -> list[str]:
    """A line a recipe, families as headings and no category: fits 80 columns."""
    rows: list[tuple[str, ...]] = [HEADERS[1:4] + HEADERS[5:]]
    families = [""]
    for card, recipes in found:
        for position, recipe in enumerate(recipes):
            row = _row(card, [recipe])
            model = row[1:4] if position == 0 else ("", "", "")
            level = row[9].replace("self-referenced", "self-ref")
            rows.append((*model, *row[5:9], level))
            families.append(card.family)
    lines = []
    previous = ""
    for family, line in zip(families, aligned(rows, gap=1), strict=True):
        if family != previous:
            lines.append(f"{family}:")
        lines.append(line)
        previous = family
    return lines


def _json(found: Found) -> str:
    return json.dumps([_record(card, recipes) for card, recipes in found], indent=2) + "\n"


def _record(card: ModelCard, recipes: list[Recipe]) -> dict[str, Any]:
    count = card.count
    return {
        "name": card.name,
        "family": card.family,
        "category": card.category,
        "aliases": list(card.aliases),
        "parameters": count and count.total,
        "active_parameters": count and count.active,
        "mtp_parameters": count and count.mtp,
        "support": card.support,
        "repositories": vars(card.repositories),
        "recipes": [vars(recipe) for recipe in recipes],
    }


def _csv(found: Found) -> str:
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*HEADERS[:2], "parameters", "active_parameters", *HEADERS[4:]])
    for card, recipes in found:
        row, count = _row(card, recipes), card.count
        sizes = (count.total, count.active) if count else ("", "")
        writer.writerow([*row[:2], *sizes, *row[4:]])
    return out.getvalue()


def _markdown(found: Found) -> str:
    rows = [HEADERS, tuple("---" for _ in HEADERS), *[_row(*one) for one in found]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", _summary(found)]) + "\n"
