"""`msllm convert`: weights between formats, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from msllm.cli import cast_weights, inspect_weights, mindspeed, verify_weights
from msllm.cli.conversion import DtypeOption, StrictOption, show_progress, summarize, torch_dtype
from msllm.cli.download import Source, local_folder

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Convert weights between Hugging Face and Megatron-core.",
)

TO_MCORE = """Examples:

  msllm convert hf-to-mcore --model models/Qwen3-8B --out qwen3-8b-mcore

  msllm convert hf-to-mcore --model qwen3-8b --source modelscope --out qwen3-8b-mcore

A model that is not here is downloaded first, into ~/.cache/msllm/models (see `msllm download`).
An interrupted conversion goes on where it was when the command is given again.
"""
TO_HF = """Examples:

  msllm convert mcore-to-hf --checkpoint qwen3-8b-mcore --out Qwen3-8B-new

  msllm convert mcore-to-hf --checkpoint RUN --out out
"""


@app.command("hf-to-mcore", epilog=TO_MCORE)
def hf_to_mcore(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_DIR", help="folder of Hugging Face weights, or a published model"
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="the checkpoint; any layout reads it")],
    source: Annotated[Source, typer.Option(help="hub of a model that is not here")] = Source.HF,
    dtype: DtypeOption = None,
    strict: StrictOption = False,
) -> None:
    """Turn Hugging Face weights into a Megatron-core checkpoint."""
    from msllm.engine.weights.partial import refuse_taken
    from msllm.engine.weights.to_mcore import hf_to_mcore as convert

    refuse_taken(out)
    folder = local_folder(model, source)
    with show_progress() as show:
        done = convert(folder, out, dtype=torch_dtype(dtype), strict=strict, progress=show)
    summarize(done, out)


@app.command("mcore-to-hf", epilog=TO_HF)
def mcore_to_hf(
    checkpoint: Annotated[
        Path, typer.Option(metavar="DIR", help="a checkpoint, or a run: its newest")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder of Hugging Face weights")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_DIR", help="config and tokenizer [those the checkpoint keeps]"
        ),
    ] = None,
    dtype: DtypeOption = None,
    strict: StrictOption = False,
) -> None:
    """Turn a Megatron-core checkpoint into Hugging Face weights."""
    from msllm.engine.weights.to_hf import mcore_to_hf as convert

    with show_progress() as show:
        done = convert(
            checkpoint, out, model=model, dtype=torch_dtype(dtype), strict=strict, progress=show
        )
    summarize(done, out)


app.command("mcore-to-mindspeed", epilog=mindspeed.TO_MINDSPEED)(mindspeed.mcore_to_mindspeed)
app.command("mindspeed-to-mcore", epilog=mindspeed.TO_MCORE)(mindspeed.mindspeed_to_mcore)
app.command("cast", epilog=cast_weights.EPILOG)(cast_weights.cast)
app.command("inspect", epilog=inspect_weights.EPILOG)(inspect_weights.inspect)
app.command("verify", epilog=verify_weights.EPILOG)(verify_weights.verify)
