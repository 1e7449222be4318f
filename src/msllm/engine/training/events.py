"""What happens between steps, as lines of events.jsonl: phases, checkpoints, warnings.

Workers write them (rank 0, or any rank that has something to say), the console in the launching
process reads them. Figures of steps are `metrics`' business.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["phase", "checkpoint", "note", "warning"]
_KINDS = ("phase", "checkpoint", "note", "warning")


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        kind: `phase`: what is being done from now on ("building the model"), until a step ends or
            another phase begins; `checkpoint`: one is complete; `note` and `warning`: shown once.
        text: For people.
        step: The step it belongs to, if any.
        time: Unix time.
    """

    kind: Kind
    text: str
    step: int | None = None
    time: float = field(default_factory=time.time)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Event | None:
        """Build from a parsed line; None where it is not an event that this msllm knows."""
        if record.get("kind") not in _KINDS:
            return None
        return cls(
            kind=record["kind"],
            text=str(record.get("text", "")),
            step=record.get("step"),
            time=float(record.get("time", 0.0)),
        )


class EventLog:
    """Appends events to a run's events.jsonl; several processes may do so at once."""

    def __init__(self, path: Path):
        self._path = path

    def write(self, kind: Kind, text: str, step: int | None = None) -> None:
        """Append one event in a single write, so that lines never mix."""
        line = json.dumps(asdict(Event(kind, text, step)), ensure_ascii=False) + "\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
