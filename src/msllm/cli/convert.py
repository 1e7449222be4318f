"""`msllm convert`: weights between Hugging Face and Megatron-core, with progress and a summary."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from msllm.engine.weights.conversion import Conversion
    from msllm.engine.weights.partial import Progress

app = typer.Typer(
    no_args_is_help=True, help="Convert weights between Hugging Face and Megatron-core."
)

TO_MCORE = """Examples:

  msllm convert hf-to-mcore --model Qwen3-8B --out qwen3-8b-mcore

An interrupted conversion goes on where it was when the command is given again.
"""
TO_HF = """Examples:

  msllm convert mcore-to-hf --checkpoint qwen3-8b-mcore --out Qwen3-8B-new

  msllm convert mcore-to-hf --checkpoint RUN/checkpoints/step-00000100 --model Qwen3-8B --out out
"""
SECONDS_A_LINE = 10.0


class Dtype(StrEnum):
    """Type of the numbers written."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


DtypeOption = Annotated[Dtype | None, typer.Option(help="type of the weights [as they are]")]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="refuse values that are no finite numbers")
]


@app.command("hf-to-mcore", epilog=TO_MCORE)
def hf_to_mcore(
    model: Annotated[Path, typer.Option(metavar="DIR", help="folder of Hugging Face weights")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="the checkpoint; any layout reads it")],
    dtype: DtypeOption = None,
    strict: StrictOption = False,
) -> None:
    """Turn Hugging Face weights into a Megatron-core checkpoint."""
    from msllm.engine.weights.to_mcore import hf_to_mcore as convert

    done = convert(model, out, dtype=_torch(dtype), strict=strict, progress=_Lines())
    _summarize(done, out)


@app.command("mcore-to-hf", epilog=TO_HF)
def mcore_to_hf(
    checkpoint: Annotated[Path, typer.Option(metavar="DIR", help="the checkpoint's folder")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder of Hugging Face weights")],
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="config and tokenizer [those the checkpoint keeps]"),
    ] = None,
    dtype: DtypeOption = None,
    strict: StrictOption = False,
) -> None:
    """Turn a Megatron-core checkpoint into Hugging Face weights."""
    from msllm.engine.weights.to_hf import mcore_to_hf as convert

    done = convert(
        checkpoint, out, model=model, dtype=_torch(dtype), strict=strict, progress=_Lines()
    )
    _summarize(done, out)


def _torch(dtype: Dtype | None) -> Any:
    import torch

    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return None if dtype is None else names[dtype.value]


class _Lines:
    """One line every SECONDS_A_LINE at most, on stderr."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, state: Progress) -> None:
        now = time.monotonic()
        if now - self._last < SECONDS_A_LINE:
            return
        self._last = now
        left = (state.total - state.done) / max(state.bytes_per_second, 1.0)
        speed = state.bytes_per_second / 1e6
        print(
            f"converting  {state.done / max(state.total, 1):4.0%}  {speed:,.0f} MB/s  "
            f"{left:,.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def _summarize(done: Conversion, out: Path) -> None:
    for name in done.not_finite:
        print(f"warning: not all values of {name} are finite numbers", file=sys.stderr)
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"tensors  {done.tensors:,}")
    print(f"bytes    {done.bytes:,} ({done.bytes / max(done.seconds, 1e-9) / 1e6:,.0f} MB/s)")
    for note in done.notes:
        print(f"note     {note}")
    print(f"wrote    {out}")
