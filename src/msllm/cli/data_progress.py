"""Progress of tokenizing: a bar on a terminal, a line now and then in a log. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msllm.engine.data.preprocess import Report

SECONDS_A_LINE = 10.0


@contextmanager
def show_progress() -> Iterator[Callable[[Report], None]]:
    """Give a function that shows the reports it is called with."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%  {task.fields[speed]}  eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, speed="")

        def show(report: Report) -> None:
            bar.update(
                task,
                total=report.total_bytes,
                completed=report.read_bytes,
                speed=speed_of(report),
            )

        yield show


class _Lines:
    """One line every SECONDS_A_LINE at most."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, report: Report) -> None:
        now = time.monotonic()
        if now - self._last < SECONDS_A_LINE:
            return
        self._last = now
        done = report.read_bytes / max(report.total_bytes, 1)
        print(f"tokenizing  {done:4.0%}  {speed_of(report)}", file=sys.stderr, flush=True)


def speed_of(report: Report) -> str:
    """Write documents and speeds: `12,345 documents  8.1 MB/s  2,012,345 tokens/s`."""
    seconds = max(report.seconds, 1e-9)
    return (
        f"{report.documents:,} documents  {report.text_bytes / seconds / 1e6:.1f} MB/s  "
        f"{report.tokens / seconds:,.0f} tokens/s"
    )
