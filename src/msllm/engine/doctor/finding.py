"""What the doctor says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a thing stands."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; no fault."""
    WARNING = "warning"
    """Training may run, slower or less safely than it could."""
    FAULT = "fault"
    """What keeps training from running."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: What: "torch_npu", "node worker-2".
        verdict: How it stands.
        found: What is there.
        mend: What to do about it; empty where nothing is to be done.
    """

    about: str
    verdict: Verdict
    found: str
    mend: str = ""
