"""Progress of tokenizing, in documents and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msllm.cli import progress

if TYPE_CHECKING:
    from msllm.engine.data.preprocess import Report


@contextmanager
def show_progress() -> Iterator[Callable[[Report], None]]:
    """Give a function that shows the reports it is called with."""
    with progress.show("tokenizing") as show:
        yield lambda report: show(report.read_bytes, report.total_bytes, speed_of(report))


def speed_of(report: Report) -> str:
    """Write documents and speeds: `12,345 documents  8.1 MB/s  2,012,345 tokens/s`."""
    seconds = max(report.seconds, 1e-9)
    return (
        f"{report.documents:,} documents  {report.text_bytes / seconds / 1e6:.1f} MB/s  "
        f"{report.tokens / seconds:,.0f} tokens/s"
    )
