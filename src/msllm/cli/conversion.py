"""What the commands of `msllm convert` share: types of numbers, progress, the summary."""

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


def torch_dtype(dtype: Dtype | None) -> Any:
    """The type of that name; None for None."""
    import torch

    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return None if dtype is None else names[dtype.value]


class Lines:
    """Progress as one line every SECONDS_A_LINE at most, on stderr."""

    def __init__(self, what: str = "converting") -> None:
        self._what, self._last = what, time.monotonic()

    def __call__(self, state: Progress) -> None:
        """Show how far the work is."""
        now = time.monotonic()
        if now - self._last < SECONDS_A_LINE:
            return
        self._last = now
        left = (state.total - state.done) / max(state.bytes_per_second, 1.0)
        speed = state.bytes_per_second / 1e6
        print(
            f"{self._what}  {state.done / max(state.total, 1):4.0%}  {speed:,.0f} MB/s  "
            f"{left:,.0f} s left",
            file=sys.stderr,
            flush=True,
        )


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
