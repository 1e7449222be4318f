"""`msllm preprocess`: text files to an indexed data set, with progress and a summary."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from msllm.engine.data.preprocess import Report

EPILOG = """Examples:

  msllm preprocess --data corpus.jsonl --tokenizer Qwen3-8B --out data/corpus

  msllm preprocess --data books/ web.parquet --text-key title,content --tokenizer tok --out data/mix

  msllm pretrain --data data/corpus ...
"""


class Task(StrEnum):
    """What the data is for."""

    PRETRAIN = "pretrain"


class OnError(StrEnum):
    """What to do about a broken record."""

    SKIP = "skip"
    FAIL = "fail"


class Format(StrEnum):
    """How the summary is printed."""

    TABLE = "table"
    JSON = "json"


def preprocess(
    data: Annotated[
        list[str],
        typer.Option(
            metavar="PATH...",
            help=".jsonl .json .txt (one document a file) .csv .parquet .arrow files, also .gz or "
            ".zst, or folders of them",
        ),
    ],
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="tokenizer folder")],
    out: Annotated[
        str,
        typer.Option(metavar="PREFIX", help="writes PREFIX_text_document.bin and .idx"),
    ],
    task: Annotated[Task, typer.Option(help="what the data is for")] = Task.PRETRAIN,
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, help="processes [one for each usable core]")
    ] = None,
    text_key: Annotated[
        str, typer.Option(help="field or column of the text; a,b joins several by a newline")
    ] = "text",
    on_error: Annotated[OnError, typer.Option(help="broken records")] = OnError.SKIP,
    eod: Annotated[
        bool, typer.Option(help="end each document with the tokenizer's EOS token")
    ] = True,
    overwrite: Annotated[bool, typer.Option(help="replace finished output")] = False,
    format: Annotated[Format, typer.Option(help="form of the summary")] = Format.TABLE,
) -> None:
    """Turn text files into an indexed data set for `msllm pretrain`."""
    from msllm.cli.data_progress import show_progress
    from msllm.engine.data.preprocess import preprocess as run

    with show_progress() as progress:
        report = run(
            [Path(path) for path in data],
            tokenizer,
            out,
            workers=workers or len(os.sched_getaffinity(0)),
            text_key=text_key,
            append_eod=eod,
            on_error=on_error.value,
            overwrite=overwrite,
            progress=progress,
        )
    if format is Format.JSON:
        _print_json(report)
    else:
        _print_table(report)


def _print_json(report: Report) -> None:
    import json

    print(json.dumps(asdict(report), indent=2))


def _print_table(report: Report) -> None:
    for example in report.examples:
        print(f"left out: {example}", file=sys.stderr)
    left_out = report.empty + report.broken
    if left_out > len(report.examples):
        print(f"left out: {left_out - len(report.examples):,} more", file=sys.stderr)
    speed = report.tokens / max(report.seconds, 1e-9)
    print(f"documents  {report.documents:,}")
    print(f"tokens     {report.tokens:,} ({speed:,.0f} tokens/s)")
    print(f"empty      {report.empty:,}")
    print(f"broken     {report.broken:,}")
    print(f"wrote      {report.prefix}.bin and .idx")
