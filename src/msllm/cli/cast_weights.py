"""`msllm convert cast`: weights as numbers of another type."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from msllm.cli.conversion import Dtype, show_progress, torch_dtype
from msllm.cli.render import size

EPILOG = """Examples:

  msllm convert cast Qwen3-8B --dtype fp16 --out Qwen3-8B-fp16

  msllm convert cast RUN --dtype bf16 --out run-bf16
"""


def cast(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Hugging Face weights, a checkpoint, or a run's folder"),
    ],
    dtype: Annotated[Dtype, typer.Option(help="new type of the weights")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="the folder to be made")],
    strict: Annotated[
        bool, typer.Option("--strict", help="refuse values that are, or become, no finite numbers")
    ] = False,
) -> None:
    """Copy weights as another type; all else stays as it is."""
    from msllm.engine.weights.cast import cast as convert

    with show_progress("casting") as show:
        done = convert(folder, out, torch_dtype(dtype), strict=strict, progress=show)
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for name in done.not_finite:
        print(f"warning: {name} has values that {dtype.value} can't hold", file=sys.stderr)
    if done.not_finite:
        print("warning: such values are infinite now", file=sys.stderr)
    print(f"tensors  {done.tensors:,}")
    print(f"bytes    {size(done.bytes)}")
    print(f"wrote    {out}")
