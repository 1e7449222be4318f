"""`msllm plot`: loss and throughput curves of runs, to a picture and to the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Examples:

  msllm plot runs/qwen3-8b-1

  msllm plot runs/a runs/b --metric loss --metric grad_norm --x tokens --out compare.png
"""


class X(StrEnum):
    """What runs along the x axis."""

    STEP = "step"
    TOKENS = "tokens"
    TIME = "time"


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="folders of runs, or metrics.jsonl files")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="picture to write (.png, .svg, .pdf) [RUN/plot.png, or ./plot.png]"),
    ] = None,
    x: Annotated[X, typer.Option(help="what runs along the x axis")] = X.STEP,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="figure to draw, may be repeated [loss, tokens_per_second]"),
    ] = None,
    smooth: Annotated[
        int | None,
        typer.Option(min=1, help="steps in the running mean [a fortieth of the run]"),
    ] = None,
    terminal: Annotated[
        bool, typer.Option(help="draw in the terminal too, beside the picture")
    ] = True,
) -> None:
    """Draw loss and throughput curves of runs, to a picture and to the terminal."""
    from msllm.engine.training.plot import (
        DEFAULT_METRICS,
        draw_picture,
        load_runs,
        make_panels,
    )
    from msllm.engine.training.plot_text import draw_terminal

    loaded = load_runs(runs)
    for run in loaded:
        if run.left_out:
            typer.echo(f"warning: {run.left_out}", err=True)
    panels = make_panels(loaded, metric or DEFAULT_METRICS, x.value, smooth)
    picture = out or (_folder(runs[0]) if len(runs) == 1 else Path()) / "plot.png"
    title = loaded[0].name if len(loaded) == 1 else f"{len(loaded)} runs"
    draw_picture(panels, picture, title)
    if terminal:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        width = min(120, shutil.get_terminal_size((80, 24)).columns)
        typer.echo(
            draw_terminal(panels, width, colour=colour, encoding=sys.stdout.encoding or "utf-8")
        )
    typer.echo(f"wrote {picture}", err=True)


def _folder(run: Path) -> Path:
    return run if run.is_dir() else run.parent
