"""The figures of one training step: what they are, how they are computed, stored and read back.

Knows no device and no framework: the loop measures tokens, seconds and bytes and hands them in.
Where figures go is `sinks`' business, how they look on a terminal `step_line`'s and `console`'s.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from msllm.errors import InputError, RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl.

    Attributes:
        step: Optimizer steps done, from 1.
        loss: Mean cross entropy over the trained tokens of the global batch, in nats.
        lr: Learning rate that this step used.
        grad_norm: Gradient norm before clipping; None where it was not computed.
        tokens: Tokens of this step over all ranks.
        tokens_per_second: Over all ranks.
        step_time_s: Wall time of this step.
        memory_bytes: Largest memory that a rank's device has held.
        mfu: Model FLOP/s a device over its peak, 0 to 1; None where the peak is unknown.
        tflops_per_device: Model TFLOP/s a device.
        consumed_samples: Samples trained on since the run's first step.
        consumed_tokens: Tokens trained on since the run's first step.
        time: Unix time at the end of the step.
        skipped: Updates skipped so far (overflow in low precision).
        nan_count: Updates so far whose gradient held NaN or inf.
        loss_parts: Further terms by name ("moe_aux", "moe_z", "mtp"), not part of `loss`.
        valid_loss: Loss on validation data, for steps with a validation.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    tokens_per_second: float
    step_time_s: float
    memory_bytes: int
    mfu: float | None
    tflops_per_device: float = 0.0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    time: float = field(default_factory=time.time)
    skipped: int = 0
    nan_count: int = 0
    loss_parts: Mapping[str, float] = field(default_factory=dict)
    valid_loss: float | None = None

    def to_json(self) -> str:
        """One line without its newline. Figures that are not finite become null."""
        record = {f.name: _finite_or_none(getattr(self, f.name)) for f in fields(self)}
        record["loss_parts"] = {k: _finite_or_none(v) for k, v in self.loss_parts.items()}
        return json.dumps(record, allow_nan=False)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepMetrics:
        """Build from a parsed line; unknown keys are left out, null figures become NaN."""
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        for name in _PLAIN_FIGURES & known.keys():
            known[name] = math.nan if known[name] is None else known[name]
        return cls(**known)

    def scalars(self) -> dict[str, float]:
        """Figures worth a curve, by the names that trackers group by."""
        curves: dict[str, float | None] = {
            "train/loss": self.loss,
            "train/lr": self.lr,
            "train/grad_norm": self.grad_norm,
            "train/consumed_tokens": self.consumed_tokens,
            "train/skipped": self.skipped,
            "valid/loss": self.valid_loss,
            "speed/tokens_per_second": self.tokens_per_second,
            "speed/step_time_s": self.step_time_s,
            "speed/tflops_per_device": self.tflops_per_device,
            "speed/mfu": self.mfu,
            "memory/gib": self.memory_bytes / 2**30,
        }
        curves |= {f"train/{name}": value for name, value in self.loss_parts.items()}
        return {name: float(value) for name, value in curves.items() if value is not None}


_PLAIN_FIGURES = {"loss", "lr", "tokens_per_second", "step_time_s", "tflops_per_device"}


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a step was."""

    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Turns tokens and seconds into speed.

    Attributes:
        flops_per_token: Model FLOPs (forward and backward, no recompute) of one token, from
            `msllm.models.counts.flops_per_token`.
        world_size: Devices that share the work.
        peak_flops: FLOP/s that one device could do at best; None if unknown.
    """

    flops_per_token: float
    world_size: int
    peak_flops: float | None = None

    def measure(self, tokens: int, seconds: float) -> Speed:
        """Speed of `tokens` (over all ranks) trained in `seconds`.

        MFU is model FLOP/s over peak FLOP/s, after Chowdhery et al., "PaLM" (2022), appendix B:
        recomputed activations do not count as work done.
        """
        per_second = tokens / max(seconds, 1e-9)
        flops = per_second * self.flops_per_token / self.world_size
        return Speed(
            tokens_per_second=per_second,
            tflops_per_device=flops / 1e12,
            mfu=flops / self.peak_flops if self.peak_flops else None,
        )


def check_finite(step: int, rank: int, **figures: float | None) -> None:
    """Raise RunError, naming step and rank, if a figure (loss, grad_norm ...) is NaN or inf."""
    for name, value in figures.items():
        if value is None or math.isfinite(value):
            continue
        raise RunError(
            f"{name.replace('_', ' ')} is {value} at step {step} on rank {rank}",
            where=f"step {step}, rank {rank}",
            hint="nothing of this step was saved: resume from the last checkpoint with a lower "
            "--lr, more warm-up steps or a smaller train.clip_grad, and look at the data of "
            "this step",
        )


def iterate_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each whole line of a metrics file, raw and parsed.

    A line that is no JSON object with a `step`, such as the half line that a killed process
    leaves at the end, is passed over.
    """
    with path.open("rb") as lines:
        for raw in lines:
            record = _record_of(raw)
            if record is not None:
                yield raw, record


def broken_lines(path: Path) -> list[int]:
    """Number the lines, from 1, that are neither a step, nor blank, nor cut off at the end.

    Raises:
        InputError: If the file can't be read.
    """
    try:
        with path.open("rb") as lines:
            return [
                number
                for number, raw in enumerate(lines, 1)
                if raw.strip() and not _is_cut(raw) and _record_of(raw) is None
            ]
    except OSError as error:
        raise _unreadable(path, error) from error


def _record_of(raw: bytes) -> dict[str, Any] | None:
    record = parse_line(raw)
    return record if record is not None and isinstance(record.get("step"), int) else None


def _is_cut(raw: bytes) -> bool:
    """Whether a line is the beginning of one that was still being written."""
    return raw.startswith(b"{") and raw.isascii() and not raw.endswith(b"\n")


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """Parse the JSON object on one line; None where there is none (yet)."""
    if not raw.endswith(b"\n"):
        return None
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_metrics(path: Path) -> list[StepMetrics]:
    """All steps of a metrics file in order, the last line winning where a step occurs twice.

    Raises:
        InputError: If the file can't be read, or a line lacks a figure that every line has.
    """
    steps: dict[int, StepMetrics] = {}
    try:
        for _, record in iterate_records(path):
            steps[record["step"]] = StepMetrics.from_record(record)
    except OSError as error:
        raise _unreadable(path, error) from error
    except TypeError as error:
        raise InputError(
            "a line lacks figures that msllm writes for every step",
            str(path),
            "is it the metrics.jsonl of an msllm run?",
        ) from error
    return [steps[step] for step in sorted(steps)]


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot read the metrics: {error.strerror}", str(path))


def truncate_after(path: Path, step: int) -> int:
    """Drop the lines of steps after `step`, and any broken line; returns how many steps are left.

    Called when a run resumes at `step`, so that no step stands in the file twice. The new file
    replaces the old one in one rename: a crash leaves the one or the other.
    """
    if not path.exists():
        return 0
    kept = [raw for raw, record in iterate_records(path) if record["step"] <= step]
    if sum(map(len, kept)) == path.stat().st_size:
        return len(kept)
    new = path.with_name(f".{path.name}.tmp")
    with new.open("wb") as out:
        out.writelines(kept)
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, path)
    return len(kept)
