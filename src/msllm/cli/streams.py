"""Standard output and error that take any text, and tell what can't be written to them."""

from __future__ import annotations

import io
import os
import sys

from msllm.errors import RunError


def prepare() -> None:
    """Have both streams write, escaped, what their encoding lacks; closed ones go nowhere."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def finish() -> None:
    """Write out what is held back.

    Raises:
        BrokenPipeError: Nobody reads it any more.
        RunError: It can't be written; the work itself is done.
    """
    error = fault()
    if error is not None:
        raise error


def fault(probe: str = "") -> RunError | None:
    """What keeps standard output from being written, which is given up then; None if nothing.

    `probe` is written to find out, where what could not be written is held back no more.
    """
    try:
        sys.stdout.write(probe)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        give_up()
        problem = f"what is printed can't be written: {error.strerror}"
        return RunError(problem, "standard output", "files that the command made are whole")
    return None


def give_up() -> None:
    """Send standard output nowhere: the flush at exit must not fail too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
