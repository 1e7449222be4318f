"""`msllm download`: a published model to a folder."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from msllm.cli.preprocess import Format
from msllm.cli.render import size

if TYPE_CHECKING:
    from msllm.engine.hub.download import Progress, Report

EPILOG = """Examples:

  msllm download qwen3-8b --out models/qwen3-8b

  msllm download qwen3-8b --out models/qwen3-8b --source modelscope

  msllm download ORG/MODEL --out tok --revision v1.1 --no-weights

HF_ENDPOINT (a mirror), HF_TOKEN, MODELSCOPE_ENDPOINT and MODELSCOPE_API_TOKEN are heeded.
An interrupted download goes on when the same command is given again.
"""


class Source(StrEnum):
    """Where models are published."""

    HF = "hf"
    MODELSCOPE = "modelscope"


def download(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME_OR_REPO", help="model of the catalog, or a repository's name"),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder to make")],
    source: Annotated[Source, typer.Option(help="hub to download from")] = Source.HF,
    revision: Annotated[
        str | None, typer.Option(help="branch, tag or commit [the hub's main branch]")
    ] = None,
    weights: Annotated[
        bool, typer.Option(help="the weights too, or config and tokenizer only")
    ] = True,
    format: Annotated[Format, typer.Option(help="form of the summary")] = Format.TABLE,
) -> None:
    """Download a published model: config, tokenizer and weights."""
    from msllm.cli import progress
    from msllm.engine.hub.download import download as run

    with progress.show("downloading") as show:
        report = run(
            name,
            out,
            source=source.value,
            revision=revision,
            weights=weights,
            progress=lambda p: show(p.done, p.total, _how(p)),
        )
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    if format is Format.JSON:
        _print_json(report)
    else:
        _print_table(report)


def local_folder(name: str, source: Source) -> Path:
    """The folder of a published model; downloaded, with progress shown, if it is not here."""
    from msllm.cli import progress
    from msllm.engine.hub.local import local_folder as find

    with progress.show("downloading") as show:
        return find(name, source.value, lambda p: show(p.done, p.total, _how(p)))


def _how(progress: Progress) -> str:
    rate = progress.received / max(progress.seconds, 1e-9)
    return f"{size(progress.done)} of {size(progress.total)}  {size(rate)}/s"


def _print_json(report: Report) -> None:
    import json

    print(json.dumps(asdict(report), indent=2))


def _print_table(report: Report) -> None:
    rate = report.received / max(report.seconds, 1e-9)
    print(f"repository  {report.repository} ({report.source}, {report.revision})")
    print(f"files       {report.files}, {size(report.size)}")
    print(f"received    {size(report.received)} ({size(rate)}/s)")
    print(f"wrote       {report.folder}")
