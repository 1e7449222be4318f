"""The live console of a run, drawn by the process that launched it.

It only reads: metrics.jsonl for steps and events.jsonl for what happens between them, both written
by the workers. So it can't slow training down, and workers need no terminal. On a terminal it is
a bar with the newest figures, anywhere else plain aligned lines.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from msllm.config import RunConfig
from msllm.engine.training.events import Event
from msllm.engine.training.metrics import StepMetrics, parse_line
from msllm.engine.training.run_folder import RunFolder
from msllm.engine.training.step_line import (
    RemainingTime,
    duration,
    figures,
    is_shown,
    step_line,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2


class Tail:
    """Follows a file of JSON lines that another process appends to.

    The file may not be there yet, may end in half a line, and may be replaced by another of the
    same name (as a resumed run does with its metrics), which is then read from its start.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: Any = None
        self._half = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the whole lines that are new since the last call."""
        if self._file is None and not self._open():
            return
        yield from self._drain()
        if self._replaced():
            self.close()
            if self._open():
                yield from self._drain()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._half = None, b""

    def _open(self) -> bool:
        try:
            self._file = self._path.open("rb")
        except OSError:
            return False
        return True

    def _replaced(self) -> bool:
        try:
            now = self._path.stat()
        except OSError:
            return False
        ours = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino)

    def _drain(self) -> Iterator[dict[str, Any]]:
        for raw in self._file:
            self._half += raw
            if not self._half.endswith(b"\n"):
                return
            record, self._half = parse_line(self._half), b""
            if record is not None:
                yield record


class View(Protocol):
    """Shows steps and events somewhere."""

    def step(self, metrics: StepMetrics) -> None:
        """Show a step."""

    def event(self, event: Event) -> None:
        """Show an event."""

    def start(self) -> None:
        """Begin to show."""

    def stop(self) -> None:
        """Show no more; what was shown stays."""


class PlainView:
    """Plain aligned lines, the same as in the rank's log."""

    def __init__(self, stream: TextIO, steps: int, interval: int):
        self._stream = stream
        self._steps = steps
        self._interval = interval
        self._left = RemainingTime(steps)

    def step(self, metrics: StepMetrics) -> None:
        """Print the step's line if it is due."""
        left = self._left.after(metrics)
        if is_shown(metrics.step, self._steps, self._interval):
            self._print(step_line(metrics, self._steps, left))

    def event(self, event: Event) -> None:
        """Print the event's text."""
        self._print(f"warning: {event.text}" if event.kind == "warning" else event.text)

    def start(self) -> None:
        """Nothing to prepare."""

    def stop(self) -> None:
        """Nothing is pending: every line was flushed."""

    def _print(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)


class LiveView:
    """A bar with the newest figures, redrawn in place on a terminal."""

    def __init__(self, console: RichConsole, title: str, steps: int):
        self._console = console
        self._title = title
        self._steps = steps
        self._left = RemainingTime(steps)
        self._began = time.monotonic()
        self._metrics: StepMetrics | None = None
        self._eta: float | None = None
        self._phase = ""
        self._checkpoint: int | None = None
        self._valid: tuple[int, float] | None = None
        spinner = "dots" if console.encoding.startswith("utf") else "line"
        self._spinner = Spinner(spinner, style="cyan")
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=5)

    def step(self, metrics: StepMetrics) -> None:
        """Take the step's figures for the next redraw."""
        self._metrics, self._phase = metrics, ""
        self._eta = self._left.after(metrics)
        if metrics.valid_loss is not None:
            self._valid = (metrics.step, metrics.valid_loss)

    def event(self, event: Event) -> None:
        """Take a phase or checkpoint for the next redraw; print notes and warnings above."""
        if event.kind == "phase":
            self._phase = event.text
        elif event.kind == "checkpoint":
            self._phase, self._checkpoint = "", event.step
        else:
            style = "yellow" if event.kind == "warning" else ""
            self._console.print(Text(event.text, style=style))

    def start(self) -> None:
        """Begin to redraw."""
        self._live.start()

    def stop(self) -> None:
        """Draw a last time and leave it there."""
        self._phase = ""
        self._live.stop()

    def render(self) -> RenderableType:
        """Draw the present state; at most three lines on a terminal of 100 columns."""
        lines: list[RenderableType] = [self._bar()]
        if self._metrics is not None:
            lines.append(Text("  ".join(" ".join(p.split()) for p in figures(self._metrics))))
        if self._phase:
            self._spinner.update(text=Text(self._phase, style="cyan"))
            lines.append(self._spinner)
        facts = self._facts()
        if facts:
            lines.append(Text(facts, style="dim"))
        return Group(*lines)

    def _bar(self) -> RenderableType:
        step = self._metrics.step if self._metrics else 0
        eta = "-" if self._eta is None else duration(self._eta)
        spent = duration(time.monotonic() - self._began)
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(overflow="ellipsis", no_wrap=True, max_width=32)
        row.add_column(ratio=1, min_width=8)
        row.add_column(no_wrap=True)
        row.add_row(
            Text(self._title, style="bold cyan"),
            ProgressBar(total=self._steps, completed=step),
            Text(f"step {step}/{self._steps}  {step / self._steps:.0%}  {spent}  eta {eta}"),
        )
        return row

    def _facts(self) -> str:
        facts = []
        if self._checkpoint is not None:
            facts.append(f"last checkpoint: step {self._checkpoint}")
        if self._valid is not None:
            facts.append(f"validation loss {self._valid[1]:.4f} at step {self._valid[0]}")
        return "  ".join(facts)


class Console:
    """Shows a run while it runs. `start` before the workers, `stop` after them.

    Args:
        run_folder: The run's folder.
        config: The run's settings, for its steps, name and line interval.
        stream: Where to show; standard error when not given.
    """

    def __init__(self, run_folder: Path, config: RunConfig, stream: TextIO | None = None):
        self._folder = RunFolder(run_folder)
        self._view = _choose_view(config, stream or sys.stderr)
        self._metrics = Tail(self._folder.metrics)
        self._events = Tail(self._folder.events)
        self._since = 0.0
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to show what is written from now on."""
        self._since = max((float(r.get("time", 0.0)) for r in self._metrics.read()), default=0.0)
        for _ in self._events.read():
            pass
        self._view.start()
        self._thread = threading.Thread(target=self._follow, name="console", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show what is still unread and end. May be called twice, or without `start`."""
        self._done.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._show_new()
        self._view.stop()
        self._metrics.close()
        self._events.close()

    def phase(self, text: str) -> None:
        """Show what the launcher itself is doing ("starting 8 workers")."""
        self._show(Event("phase", text))

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._show(Event("note", text))

    def _follow(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            try:
                self._show_new()
            except Exception:
                logger.exception("the console failed; training goes on without it")
                return

    def _show_new(self) -> None:
        steps = [StepMetrics.from_record(r) for r in self._metrics.read() if "step" in r]
        events = [Event.from_record(r) for r in self._events.read()]
        # A file that was replaced is read from its start again: its old lines are not news.
        new: list[StepMetrics | Event] = [s for s in steps if s.time > self._since]
        self._since = max([self._since, *(s.time for s in new)])
        new += [e for e in events if e is not None]
        for item in sorted(new, key=lambda item: item.time):
            self._show(item)

    def _show(self, item: StepMetrics | Event) -> None:
        with self._lock:
            if isinstance(item, StepMetrics):
                self._view.step(item)
            else:
                self._view.event(item)


def _choose_view(config: RunConfig, stream: TextIO) -> View:
    console = RichConsole(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, Path(config.model).name, config.train.steps)
    return PlainView(stream, config.train.steps, config.log.interval)
