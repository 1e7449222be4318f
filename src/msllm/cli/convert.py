"""`msllm convert`: weights between formats, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from msllm.cli import cast_weights, inspect_weights, mindspeed, verify_weights
from msllm.cli.conversion import DtypeOption, Lines, StrictOption, summarize, torch_dtype

app = typer.Typer(
    no_args_is_help=True, help="Convert weights between Hugging Face and Megatron-core."
)

TO_MCORE = """Examples:

  msllm convert hf-to-mcore --model Qwen3-8B --out qwen3-8b-mcore

An interrupted conversion goes on where it was when the command is given again.
"""
TO_HF = """Examples:

  msllm convert mcore-to-hf --checkpoint qwen3-8b-mcore --out Qwen3-8B-new

  msllm convert mcore-to-hf --checkpoint RUN --out out
"""


@app.command("hf-to-mcore", epilog=TO_MCORE)
def hf_to_mcore(
    model: Annotated[Path, typer.Option(metavar="DIR", help="folder of Hugging Face weights")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="the checkpoint; any layout reads it")],
    dtype: DtypeOption = None,
    strict: StrictOption = False,
) -> None:
    """Turn Hugging Face weights into a Megatron-core checkpoint."""
    from msllm.engine.weights.to_mcore import hf_to_mcore as convert

    done = convert(model, out, dtype=torch_dtype(dtype), strict=strict, progress=Lines())
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

    done = convert(
        checkpoint, out, model=model, dtype=torch_dtype(dtype), strict=strict, progress=Lines()
    )
    summarize(done, out)


app.command("mcore-to-mindspeed", epilog=mindspeed.TO_MINDSPEED)(mindspeed.mcore_to_mindspeed)
app.command("mindspeed-to-mcore", epilog=mindspeed.TO_MCORE)(mindspeed.mindspeed_to_mcore)
app.command("cast", epilog=cast_weights.EPILOG)(cast_weights.cast)
app.command("inspect", epilog=inspect_weights.EPILOG)(inspect_weights.inspect)
app.command("verify", epilog=verify_weights.EPILOG)(verify_weights.verify)
