"""`msllm convert mcore-to-mindspeed` and back: weights as MindSpeed-LLM has them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from msllm.cli.conversion import DtypeOption, StrictOption, show_progress, summarize, torch_dtype

TO_MINDSPEED = """Examples:

  msllm convert mcore-to-mindspeed --checkpoint qwen3-8b-mcore --out qwen3-8b-tp8 --tp 8

  msllm convert mcore-to-mindspeed --checkpoint RUN --out moe --tp 2 --pp 4 --vpp 2 --ep 8
"""
TO_MCORE = """Examples:

  msllm convert mindspeed-to-mcore --checkpoint qwen3-8b-tp8 --model Qwen3-8B --out qwen3-8b-mcore

The parallel sizes are read from the files.
"""


def mcore_to_mindspeed(
    checkpoint: Annotated[
        Path, typer.Option(metavar="DIR", help="a checkpoint, or a run: its newest")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="the folder to be made")],
    tp: Annotated[int, typer.Option(min=1, help="tensor parallel size")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="pipeline parallel size")] = 1,
    vpp: Annotated[int, typer.Option(min=1, help="pipeline chunks a stage")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="expert parallel size")] = 1,
    etp: Annotated[int, typer.Option(min=1, help="expert tensor parallel size, 1 or --tp")] = 1,
    vocab_multiple: Annotated[
        int, typer.Option(min=1, help="pad the vocabulary to a multiple of this, times --tp")
    ] = 128,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="config [that the checkpoint keeps]")
    ] = None,
    dtype: DtypeOption = None,
    strict: StrictOption = False,
) -> None:
    """Turn a checkpoint into MindSpeed-LLM's files of each rank."""
    from msllm.engine.layout import Layout
    from msllm.engine.weights.mindspeed import mcore_to_mindspeed as convert

    layout = Layout(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, sequence_parallel=tp > 1)
    with show_progress() as show:
        done = convert(
            checkpoint,
            out,
            layout,
            model=model,
            vocabulary_multiple=vocab_multiple,
            dtype=torch_dtype(dtype),
            strict=strict,
            progress=show,
        )
    summarize(done, out)


def mindspeed_to_mcore(
    checkpoint: Annotated[
        Path, typer.Option(metavar="DIR", help="folder with mp_rank_00 ..., or with one of such")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="the checkpoint; any layout reads it")],
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="the model's config and tokenizer [those kept beside]"),
    ] = None,
    dtype: DtypeOption = None,
    strict: StrictOption = False,
) -> None:
    """Turn MindSpeed-LLM's files of each rank into a checkpoint."""
    from msllm.engine.weights.mindspeed import mindspeed_to_mcore as convert

    with show_progress() as show:
        done = convert(
            checkpoint, out, model=model, dtype=torch_dtype(dtype), strict=strict, progress=show
        )
    summarize(done, out)
