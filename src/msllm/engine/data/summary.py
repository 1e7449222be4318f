"""What `msllm preprocess` knows of the files it wrote, kept beside them as PREFIX.json.

Training reads it to refuse data of another vocabulary before it starts; files from elsewhere have
none, and work without.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError


class Summary(BaseModel):
    """Facts about one indexed prefix."""

    model_config = ConfigDict(frozen=True)

    documents: int
    tokens: int
    largest_token: int
    tokenizer: str
    """Fingerprint of the tokenizer."""
    eod: int | None


def summary_file(prefix: Path) -> Path:
    """PREFIX.json."""
    return Path(f"{prefix}.json")


def read_summary(prefix: Path) -> Summary | None:
    """Read the prefix's summary; None if it has none, or one that something else wrote."""
    try:
        return Summary.model_validate(json.loads(summary_file(prefix).read_text("utf-8")))
    except (OSError, ValueError, ValidationError):
        return None


def write_summary(prefix: Path, summary: Summary) -> None:
    """Write PREFIX.json by rename."""
    path = summary_file(prefix)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(summary.model_dump_json(indent=2) + "\n", "utf-8")
    temporary.replace(path)
