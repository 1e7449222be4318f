"""`msllm doctor`: whether this machine, and the others of a job, are fit to train."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from msllm.cli.list_models import aligned, choice
from msllm.errors import EXIT_FAILED

if TYPE_CHECKING:
    from msllm.engine.doctor import Finding

EPILOG = """Examples:

  msllm doctor

  msllm doctor --node worker-1 --node worker-2:29500 --out /shared/runs

Exit status: 0 if nothing keeps training from running, 1 if something does.
"""
FORMATS = ("table", "json")


def doctor(
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST[:PORT]", help="another node of the job, to be reached"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="where runs go")] = Path("runs"),
    format: Annotated[str, typer.Option(help="table or json", metavar="NAME")] = "table",
) -> None:
    """Tell whether this machine is fit to train, and what would mend it."""
    format = choice("--format", format, FORMATS) or "table"

    from msllm.engine.doctor import Verdict, examine

    found = list(examine(out, node or []))
    faults = [finding for finding in found if finding.verdict is Verdict.FAULT]
    if format == "json":
        record = {"fit": not faults, "findings": [asdict(finding) for finding in found]}
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(found, len(faults))) + "\n")
    if faults:
        raise typer.Exit(EXIT_FAILED)


def _lines(found: Sequence[Finding], faults: int) -> list[str]:
    rows = aligned([(f.verdict.value, f.about, f.found) for f in found], gap=2)
    lines = []
    for finding, row in zip(found, rows, strict=True):
        lines.append(row)
        if finding.mend:
            lines.append(f"         {finding.mend}")
    said = "nothing keeps training from running" if not faults else f"{faults} to be mended"
    return [*lines, "", said]
