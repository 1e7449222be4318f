"""`msllm tokenizer`: tokenizers of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from msllm.cli.preprocess import OnError

TRAIN_EPILOG = """Examples:

  msllm tokenizer train --data corpus.jsonl --vocab-size 32000 --out tok

  msllm tokenizer train --data books/ web.parquet --text-key content --vocab-size 65000 --out tok
"""

app = typer.Typer(
    name="tokenizer", help="Make a tokenizer.", no_args_is_help=True, add_completion=False
)


@app.callback()
def tokenizer() -> None:
    """Make a tokenizer."""


@app.command(epilog=TRAIN_EPILOG)
def train(
    data: Annotated[
        list[str],
        typer.Option(metavar="PATH...", help="text files or folders, as for msllm preprocess"),
    ],
    vocab_size: Annotated[
        int, typer.Option(min=1, help="ids in all, bytes and special tokens included")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder to write")],
    text_key: Annotated[
        str, typer.Option(help="field or column of the text; a,b joins several by a newline")
    ] = "text",
    on_error: Annotated[OnError, typer.Option(help="broken records")] = OnError.SKIP,
) -> None:
    """Train a byte-level BPE tokenizer that transformers loads."""
    from msllm.engine.data.train_tokenizer import train_tokenizer

    size = train_tokenizer(
        [Path(path) for path in data],
        vocab_size,
        out,
        text_key=text_key,
        on_error=on_error.value,
    )
    print(f"wrote a tokenizer of {size:,} ids to {out}", file=sys.stderr)
