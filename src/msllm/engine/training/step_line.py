"""How one training step reads as text: the one aligned line of logs and consoles.

The keys are those of metrics.jsonl, the units are spelled out. What is shown beside the line
(bars, phases) is `console`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msllm.engine.training.metrics import StepMetrics

GIB = 2**30


def duration(seconds: float) -> str:
    """Seconds as people say them: `42s`, `3m 07s`, `1h 12m`, `2d 04h`."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24:02d}h"
    if hours:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{whole}s"


@dataclass(slots=True)
class RemainingTime:
    """Time left of a run, from the recent steps' mean duration.

    The first step seen pays for warm-up (allocation, compilation) and is forgotten as soon as
    there is a second.
    """

    steps: int
    _mean: float | None = field(default=None, init=False)
    _seen: int = field(default=0, init=False)

    def after(self, metrics: StepMetrics) -> float:
        """Seconds left after this step."""
        self._seen += 1
        if self._mean is None or self._seen == 2:
            self._mean = metrics.step_time_s
        else:
            self._mean += (metrics.step_time_s - self._mean) * max(0.05, 1 / (self._seen - 1))
        return self._mean * max(0, self.steps - metrics.step)


def figures(metrics: StepMetrics) -> list[str]:
    """Format a step's figures as aligned pieces, without step and remaining time."""
    norm = "-" if metrics.grad_norm is None else f"{metrics.grad_norm:.2f}"
    pieces = [
        f"loss {metrics.loss:7.4f}",
        *(f"{name} {value:.4f}" for name, value in metrics.loss_parts.items()),
        f"lr {metrics.lr:.2e}",
        f"gnorm {norm:>6}",
        f"{metrics.memory_bytes / GIB:6.2f} GiB",
        f"{metrics.tokens_per_second:>9,.0f} tok/s",
        f"{metrics.tflops_per_device:6.2f} TFLOP/s/dev"
        if metrics.tflops_per_device >= 0.1
        else f"{metrics.tflops_per_device * 1e3:6.2f} GFLOP/s/dev",
    ]
    if metrics.mfu is not None:
        pieces.append(f"mfu {metrics.mfu:6.1%}")
    if metrics.skipped:
        pieces.append(f"skipped {metrics.skipped}")
    if metrics.valid_loss is not None:
        pieces.append(f"valid {metrics.valid_loss:.4f}")
    return pieces


def step_line(metrics: StepMetrics, steps: int, seconds_left: float) -> str:
    """Format the whole line of one step, aligned with the lines before and after it."""
    width = len(str(steps))
    head = f"step {metrics.step:>{width}}/{steps}"
    return "  ".join([head, *figures(metrics), f"eta {duration(seconds_left)}"])


def is_shown(step: int, steps: int, interval: int) -> bool:
    """Whether a step gets a line: the first, the last, and every `interval`-th."""
    return step % interval == 0 or step in (1, steps)
