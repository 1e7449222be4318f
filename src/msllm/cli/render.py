"""What all commands print alike: errors, defects, sizes.

Errors go to standard error: one panel on a terminal, plain unbroken lines anywhere else, so that a
log can be searched for them.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from msllm.errors import EXIT_FAILED, Interrupted, MsllmError, Problem

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def show_error(error: MsllmError, debug: bool = False, stream: TextIO | None = None) -> None:
    """Show all problems of an error: what, where, what to do."""
    if debug:
        traceback.print_exception(error, file=stream or sys.stderr)
    count = len(error.problems)
    title = "error" if count == 1 else f"{count} errors"
    if isinstance(error, Interrupted):
        title = "stopped"
    show_panel(title, [_lines(problem) for problem in error.problems], stream)


def show_defect(error: Exception, debug: bool = False, stream: TextIO | None = None) -> int:
    """Show an exception that nobody foresaw; returns the exit status."""
    if debug:
        traceback.print_exception(error, file=stream or sys.stderr)
    lines = [("", "this is a defect of msllm"), ("", _one_line(error)), ("at", _last_frame(error))]
    if not debug:
        lines.append(("try", "run it again with --debug for the whole traceback, and report it"))
    show_panel("unexpected error", [lines], stream)
    return EXIT_FAILED


def show_panel(
    title: str, blocks: list[list[tuple[str, str]]], stream: TextIO | None = None
) -> None:
    """Show blocks of (label, text) lines on standard error."""
    stream = stream or sys.stderr
    if stream.isatty():
        _show_box(title, blocks, stream)
        return
    print(f"{title}:", file=stream)
    for block in blocks:
        for position, (label, text) in enumerate(block):
            mark = "  - " if position == 0 else "    "
            shown = f"{label}: {text}" if label else text
            print(mark + shown.replace("\n", "\n    "), file=stream)
    stream.flush()


def size(number: float) -> str:
    """Write bytes for people: 1.5 GiB."""
    for unit in _UNITS:
        if abs(number) < 1024 or unit == _UNITS[-1]:
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.2f} {unit}"


def _lines(problem: Problem) -> list[tuple[str, str]]:
    lines = [("", problem.problem)]
    if problem.where:
        lines.append(("at", problem.where))
    if problem.hint:
        lines.append(("try", problem.hint))
    return lines


def _show_box(title: str, blocks: list[list[tuple[str, str]]], stream: TextIO) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = []
    for number, block in enumerate(blocks):
        if number:
            parts.append(Text())
        for label, text in block:
            line = Text(f"{label:>3}  " if label else "", style="dim")
            parts.append(line.append(text, style="not dim"))
    box = Panel(Group(*parts), title=title, title_align="left", border_style="red")
    Console(file=stream, highlight=False).print(box)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _last_frame(error: Exception) -> str:
    """Name the innermost place inside msllm where it happened, and where it came from there."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    own = [f for f in frames if "msllm" in Path(f.filename).parts] or frames
    last = own[-1]
    place = f"{last.filename}:{last.lineno} in {last.name}"
    return place if last is frames[-1] else f"{place} (through {frames[-1].filename})"
