"""Progress of long work: a bar on a terminal, a line now and then in a log. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_A_LINE = 10.0

Show = Callable[[int, int, str], None]
"""Called with what is done, what there is in all, and a text on how it goes."""


@contextmanager
def show(work: str) -> Iterator[Show]:
    """Give a function that shows how far `work`, such as "tokenizing", is."""
    if not sys.stderr.isatty():
        yield _Lines(work)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(work),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%  {task.fields[how]}  eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, how="")

        def update(done: int, total: int, how: str) -> None:
            bar.update(task, total=total, completed=done, how=how)

        yield update


class _Lines:
    """One line every SECONDS_A_LINE at most."""

    def __init__(self, work: str) -> None:
        self._work = work
        self._last = time.monotonic()
        self._first: tuple[int, float] | None = None

    def __call__(self, done: int, total: int, how: str) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = done, now
        if now - self._last < SECONDS_A_LINE:
            return
        self._last = now
        line = f"{self._work}  {done / max(total, 1):4.0%}  {how}{self._left(done, total, now)}"
        print(line, file=sys.stderr, flush=True)

    def _left(self, done: int, total: int, now: float) -> str:
        """How long it will take at the speed since the first call, which may be a late one."""
        begun, start = self._first or (done, now)
        if done <= begun:
            return ""
        return f"  {(total - done) * (now - start) / (done - begun):,.0f} s left"
