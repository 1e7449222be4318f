"""`msllm convert verify`: whether two folders hold the same weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from msllm.cli.conversion import show_progress
from msllm.cli.list_models import aligned, choice
from msllm.cli.render import size
from msllm.errors import EXIT_FAILED

if TYPE_CHECKING:
    from msllm.engine.weights.torch_dist import StoredTensor
    from msllm.engine.weights.verify import Difference, Verdict

EPILOG = """Examples:

  msllm convert verify Qwen3-8B qwen3-8b-mcore

  msllm convert verify Qwen3-8B Qwen3-8B-fp32 --tolerance 0

Exit status: 0 if they are the same, 1 if they differ, 2 if they can't be compared.
"""
FORMATS = ("table", "json")
SHOWN = 50
Folder = Annotated[
    Path, typer.Argument(help="weights, a checkpoint, or a run's folder", show_default=False)
]


def verify(
    a: Folder,
    b: Folder,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="most by which values may differ, absolutely or relatively; types may differ "
            "too [all bits the same]",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="config of weights that have none beside them"),
    ] = None,
    format: Annotated[str, typer.Option(help="table or json", metavar="NAME")] = "table",
) -> None:
    """Tell whether two folders hold the same weights, whatever their formats."""
    format = choice("--format", format, FORMATS) or "table"

    from msllm.engine.weights.verify import verify as compare

    with show_progress("comparing") as show:
        verdict = compare(a, b, tolerance=tolerance, model=model, progress=show)
    if format == "json":
        sys.stdout.write(json.dumps(_record(verdict), indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(verdict)) + "\n")
    if not verdict.same:
        raise typer.Exit(EXIT_FAILED)


def _lines(verdict: Verdict) -> list[str]:
    compared = f"{verdict.tensors:,} tensors ({size(verdict.bytes)}) compared"
    if verdict.same:
        return [f"the same: {compared}"]
    count = len(verdict.differences)
    rows = [_row(difference) for difference in verdict.differences[:SHOWN]]
    lines = [f"different: {compared}, {count:,} differ", "", *aligned(rows, gap=2)]
    if count > SHOWN:
        lines.append(f"and {count - SHOWN:,} more")
    if all(d.a and d.b and d.a.dtype != d.b.dtype for d in verdict.differences):
        lines += ["", "all are of another type: --tolerance compares numbers, whatever their type"]
    return lines


def _row(d: Difference) -> tuple[str, str]:
    if d.a is None or d.b is None:
        return d.name, "only in the second" if d.a is None else "only in the first"
    if d.largest is None:
        return d.name, f"{list(d.a.shape)} and {list(d.b.shape)}"
    said = f"largest difference {d.largest:.3g}, relative {d.relative:.3g}; {d.count:,} values"
    if d.a.dtype != d.b.dtype:
        said = f"{_dtype(d.a)} and {_dtype(d.b)}; {said}"
    return d.name, said


def _dtype(held: StoredTensor) -> str:
    return str(held.dtype).removeprefix("torch.")


def _record(verdict: Verdict) -> dict[str, Any]:
    return {
        "same": verdict.same,
        "tensors": verdict.tensors,
        "bytes": verdict.bytes,
        "differences": [
            {
                "name": d.name,
                "shapes": [None if side is None else list(side.shape) for side in (d.a, d.b)],
                "dtypes": [None if side is None else _dtype(side) for side in (d.a, d.b)],
                "largest": _number(d.largest),
                "relative": _number(d.relative),
                "values": d.count,
            }
            for d in verdict.differences
        ],
    }


def _number(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return str(value) if value == float("inf") else value
