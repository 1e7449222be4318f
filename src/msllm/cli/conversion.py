"""What the commands of `msllm convert` share: types of numbers, progress, the summary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from msllm.cli import progress
from msllm.cli.render import size

if TYPE_CHECKING:
    from msllm.engine.weights.conversion import Conversion
    from msllm.engine.weights.partial import Progress


class Dtype(StrEnum):
    """Type of the numbers written."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


DtypeOption = Annotated[Dtype | None, typer.Option(help="type of the weights [as they are]")]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="refuse values that are no finite numbers")
]


def torch_dtype(dtype: Dtype | None) -> Any:
    """The type of that name; None for None."""
    import torch

    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return None if dtype is None else names[dtype.value]


@contextmanager
def show_progress(work: str = "converting") -> Iterator[Callable[[Progress], None]]:
    """Give a function that shows how far `work` is, in bytes."""
    with progress.show(work) as show:
        yield lambda state: show(state.done, state.total, _how(state))


def _how(state: Progress) -> str:
    return f"{size(state.done)} of {size(state.total)}  {size(state.bytes_per_second)}/s"


def summarize(done: Conversion, out: Path) -> None:
    """Say what a conversion did."""
    for name in done.not_finite:
        print(f"warning: not all values of {name} are finite numbers", file=sys.stderr)
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"tensors  {done.tensors:,}")
    print(f"bytes    {done.bytes:,} ({done.bytes / max(done.seconds, 1e-9) / 1e6:,.0f} MB/s)")
    for note in done.notes:
        print(f"note     {note}")
    print(f"wrote    {out}")
