"""How a worker tells its launcher what went wrong, and how the launcher words it.

A worker writes one small file; a worker that was killed writes none, and then its exit status and
the end of its log must do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

from msllm.errors import MsllmError, Problem

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the path of the file; torch's elastic agent reads `message` and `timestamp`."""
SHOWN_LINES = 14


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that ended badly.

    Attributes:
        rank: Its global rank.
        exit_code: Its exit status, negative for a signal, None while it still runs.
        log: Its log.
        time: When it reported its error, seconds since the epoch; None if it did not.
        problems: What it reported.
        detail: Last lines of its traceback.
    """

    rank: int
    exit_code: int | None
    log: Path
    time: float | None = None
    problems: tuple[Problem, ...] = ()
    detail: str = field(default="", repr=False)

    @property
    def order(self) -> tuple[bool, float]:
        """Sorts the likeliest cause first: the kill before the complaints of lost connections."""
        killed = self.exit_code is not None and self.exit_code < 0
        return (not killed, self.time or 0.0)

    def describe(self) -> list[Problem]:
        """Say what happened, where the log is, and what to do."""
        if self.problems:
            first, *others = self.problems
            named = Problem(f"rank {self.rank}: {first.problem}", first.where, first.hint)
            if self.detail:
                named = Problem(f"{named.problem}\n{self.detail}", str(self.log), first.hint)
            return [named, *others]
        tail = "\n".join(_last_lines(self.log))
        ending, hint = _ending(self.exit_code)
        text = f"rank {self.rank} {ending}"
        return [Problem(f"{text}; its last lines:\n{tail}" if tail else text, str(self.log), hint)]


def report_error(error: BaseException) -> None:
    """Write down for the launcher what ended this worker; does nothing without a launcher."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    problems, detail = _words(error)
    record = {
        "message": str(error) or type(error).__name__,
        "timestamp": time.time(),
        "problems": [asdict(problem) for problem in problems],
        "detail": detail,
    }
    temporary = Path(f"{path}.tmp")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(path)


def read_failure(rank: int, exit_code: int | None, log: Path, error_file: Path) -> Failure | None:
    """Read what a worker reported; None if it is well so far."""
    try:
        record = json.loads(error_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Failure(rank, exit_code, log) if exit_code else None
    return Failure(
        rank,
        exit_code,
        log,
        float(record["timestamp"]),
        tuple(Problem(**problem) for problem in record["problems"]),
        record["detail"],
    )


def _words(error: BaseException) -> tuple[list[Problem], str]:
    if isinstance(error, MsllmError):
        return error.problems, ""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    name = type(error).__name__
    text = f"{name}: {error}" if str(error) else name
    return [Problem(text)], "\n".join(lines[-SHOWN_LINES:])


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open(encoding="utf-8", errors="replace") as stream:
            return [line.rstrip() for line in deque(stream, SHOWN_LINES)]
    except OSError:
        return []


def _ending(exit_code: int | None) -> tuple[str, str]:
    if exit_code is None or exit_code >= 0:
        return f"ended with status {exit_code}", "see the whole log"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if exit_code == -signal.SIGKILL:
        return f"was killed by {name}", (
            "the system may have killed it because memory ran out (see `dmesg`): use less with "
            "--micro-batch, --recompute full or a larger --tp; --dry-run shows the estimate"
        )
    return f"was ended by {name}", "see the whole log"
