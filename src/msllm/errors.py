"""Errors a user can act on: what is wrong, where, and what to do about it.

Code raises these; only `msllm.cli` prints them (one panel, no traceback) and turns them into the
exit status. Anything else that escapes is a defect of msllm and is shown as one.
"""

from __future__ import annotations

from dataclasses import dataclass

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        problem: What is wrong, with the value that was given: "tensor parallel size 3 does not
            divide the 32 attention heads".
        where: The flag, file or line it comes from: "--tp 3", "data.jsonl:12".
        hint: What to do about it: "use 1, 2, 4, 8, 16 or 32".
    """

    problem: str
    where: str = ""
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{text} ({self.hint})" if self.hint else text


class MsllmError(Exception):
    """Base of all errors meant for the user. Holds one or more problems, shown together."""

    exit_status = EXIT_FAILED

    def __init__(self, problem: str | Problem | list[Problem], where: str = "", hint: str = ""):
        if isinstance(problem, str):
            problem = Problem(problem, where, hint)
        self.problems: list[Problem] = problem if isinstance(problem, list) else [problem]
        super().__init__("\n".join(str(p) for p in self.problems))


class InputError(MsllmError):
    """Wrong usage or input, found before any work was done. Exit status 2."""

    exit_status = EXIT_USAGE


class RunError(MsllmError):
    """Something failed while running. Exit status 1."""

    exit_status = EXIT_FAILED


class Interrupted(MsllmError):
    """The user stopped the run; what could be saved was saved. Exit status 130."""

    exit_status = EXIT_INTERRUPTED


def closest(name: str, choices: list[str], n: int = 3) -> list[str]:
    """The `n` choices most like `name`, best first; for "did you mean" hints."""
    import difflib

    by_lower = {c.lower(): c for c in choices}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=n, cutoff=0.0)
    return [by_lower[f] for f in found]


def first_line(error: BaseException) -> str:
    """What an error says in its first line; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
