"""Curves of one or several runs, from their metrics.jsonl to a picture.

Here are the curves themselves and the picture; `plot_text` draws the same panels as text. What the
figures mean is `metrics`' business. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from msllm.engine.training.metrics import StepMetrics, broken_lines, read_metrics
from msllm.errors import InputError, MsllmError, Problem, closest

XAxis = Literal["step", "tokens", "time"]
PICTURES = (".png", ".svg", ".pdf")
DEFAULT_METRICS = ("loss", "tokens_per_second")
_COLOURS = (
    "#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#4b5563",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something that can be drawn: its axis label and how to take it from a step."""

    label: str
    take: Callable[[StepMetrics], float | None]
    from_zero: bool = False
    """Whether the axis begins at 0: for speeds and sizes, whose ratio matters."""


QUANTITIES: dict[str, Quantity] = {
    "loss": Quantity("loss (nats a token)", lambda m: m.loss),
    "valid_loss": Quantity("validation loss (nats a token)", lambda m: m.valid_loss),
    "lr": Quantity("learning rate", lambda m: m.lr, True),
    "grad_norm": Quantity("gradient norm", lambda m: m.grad_norm, True),
    "tokens_per_second": Quantity("tokens/s", lambda m: m.tokens_per_second, True),
    "step_time_s": Quantity("time a step (s)", lambda m: m.step_time_s, True),
    "tflops_per_device": Quantity("TFLOP/s a device", lambda m: m.tflops_per_device, True),
    "mfu": Quantity("MFU (%)", lambda m: None if m.mfu is None else 100 * m.mfu, True),
    "memory_bytes": Quantity("memory (GiB)", lambda m: m.memory_bytes / 2**30, True),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A run's name in the legend, its steps, and what of its file could not be read, in words."""

    name: str
    steps: Sequence[StepMetrics]
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot; `smooth` is `y` averaged over neighbouring steps. NaN is a gap."""

    name: str
    x: np.ndarray
    y: np.ndarray
    smooth: np.ndarray


@dataclass(frozen=True, slots=True)
class Panel:
    """All runs' curves of one quantity; `points` are drawn as markers (validation loss)."""

    title: str
    x_label: str
    quantity: Quantity
    curves: tuple[Curve, ...]
    points: tuple[Curve, ...] = ()


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs from their folders or their metrics.jsonl.

    Raises:
        InputError: With one problem for each path that holds no steps.
    """
    problems: list[Problem] = []
    found: list[tuple[Path, list[StepMetrics], str]] = []
    for path in paths:
        file = path / "metrics.jsonl" if path.is_dir() else path
        try:
            if not file.exists():
                what = "has no metrics.jsonl" if path.is_dir() else "does not exist"
                raise InputError(f"{path} {what}", "RUN", "give the folder of an msllm run")
            steps, broken = read_metrics(file), broken_lines(file)
            if broken and not steps:
                what = f"{file} is damaged: no line of it can be read"
                raise InputError(what, "RUN", "restore it from a copy, or leave the run out")
            if not steps:
                raise InputError(f"{file} holds no finished step yet", "RUN", "wait for step 1")
        except MsllmError as error:
            problems += error.problems
        else:
            found.append((file.parent, steps, _left_out(file, broken)))
    if problems:
        raise InputError(problems)
    names = _short_names([folder for folder, *_ in found])
    return [
        Run(name, steps, left_out) for name, (_, steps, left_out) in zip(names, found, strict=True)
    ]


def _left_out(file: Path, broken: Sequence[int]) -> str:
    if not broken:
        return ""
    first = f"line {broken[0]:,}"
    if len(broken) == 1:
        return f"{file}: {first} is damaged and left out"
    return f"{file}: {len(broken):,} lines are damaged and left out, the first is {first}"


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Take the shortest tails of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(folder) for folder in folders]


def make_panels(
    runs: Sequence[Run],
    metrics: Sequence[str] = DEFAULT_METRICS,
    x: XAxis = "step",
    smooth: int | None = None,
) -> list[Panel]:
    """Arrange runs into one panel a metric.

    Args:
        runs: What to draw.
        metrics: Names of QUANTITIES, or of a loss part such as `moe_aux`.
        x: What runs along the x axis.
        smooth: Steps in a running mean; a fortieth of the longest run when not given.

    Raises:
        InputError: If a metric is unknown, or no run has it.
    """
    window = smooth or max(1, max(len(run.steps) for run in runs) // 40)
    scale, x_label = _x_scale(runs, x)
    panels = [
        _panel(runs, name, quantity, x_label, lambda steps: scale(_x_values(steps, x)), window)
        for name, quantity in _quantities(runs, metrics).items()
    ]
    problems = [
        Problem(f"no run has a figure for {name}", "--metric", "leave it out")
        for name, panel in zip(metrics, panels, strict=True)
        if not any(np.isfinite(c.y).any() for c in panel.curves)
    ]
    if problems:
        raise InputError(problems)
    return panels


def _quantities(runs: Sequence[Run], metrics: Sequence[str]) -> dict[str, Quantity]:
    parts = sorted({part for run in runs for step in run.steps for part in step.loss_parts})
    known = QUANTITIES | {part: Quantity(part, partial(_loss_part, part)) for part in parts}
    problems = [
        Problem(f"there is no metric {m}", "--metric", "try " + ", ".join(closest(m, list(known))))
        for m in metrics
        if m not in known
    ]
    if problems:
        raise InputError(problems)
    return {name: known[name] for name in metrics}


def _loss_part(name: str, step: StepMetrics) -> float | None:
    return step.loss_parts.get(name)


def _panel(
    runs: Sequence[Run],
    name: str,
    quantity: Quantity,
    x_label: str,
    place: Callable[[Sequence[StepMetrics]], np.ndarray],
    window: int,
) -> Panel:
    window = 1 if name in ("lr", "valid_loss") else window
    curves = tuple(_curve(run, quantity, place, window) for run in runs)
    points: tuple[Curve, ...] = ()
    if name == "loss":
        valid = (_curve(run, QUANTITIES["valid_loss"], place, 1) for run in runs)
        points = tuple(c for c in valid if np.isfinite(c.y).any())
    return Panel(name.replace("_", " "), x_label, quantity, curves, points)


def _curve(
    run: Run,
    quantity: Quantity,
    place: Callable[[Sequence[StepMetrics]], np.ndarray],
    window: int,
) -> Curve:
    taken = [quantity.take(step) for step in run.steps]
    y = np.array([math.nan if v is None else v for v in taken], dtype=float)
    y[~np.isfinite(y)] = math.nan
    return Curve(run.name, place(run.steps), y, running_mean(y, window))


def running_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Mean over `window` values around each; gaps stay gaps and count for nothing.

    At the ends the window shrinks on both sides alike, so that a falling curve is not bent.
    """
    known = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(y))
    half = np.minimum(np.minimum(at, len(y) - 1 - at), max(0, window // 2))
    low, high = at - half, at + half + 1
    number = counts[high] - counts[low]
    mean = (sums[high] - sums[low]) / np.maximum(number, 1)
    return np.where(known, mean, math.nan)


def _x_values(steps: Sequence[StepMetrics], x: XAxis) -> np.ndarray:
    """Place of each step: its number, tokens so far, or seconds of training so far."""
    if x == "step":
        return np.array([s.step for s in steps], dtype=float)
    if x == "time":
        return np.cumsum([s.step_time_s for s in steps])
    if all(s.consumed_tokens for s in steps):
        return np.array([s.consumed_tokens for s in steps], dtype=float)
    return np.cumsum([float(s.tokens) for s in steps])


def _x_scale(runs: Sequence[Run], x: XAxis) -> tuple[Callable[[np.ndarray], np.ndarray], str]:
    """Choose the unit that suits the longest run: a function on the values, and an axis label."""
    if x == "step":
        return (lambda v: v), "step"
    units = {
        "time": ((3600 * 48, 86400, "days"), (7200, 3600, "h"), (120, 60, "min"), (0, 1, "s")),
        "tokens": ((1e12, 1e12, "trillion"), (1e9, 1e9, "billion"), (1e6, 1e6, "million"),
                   (0, 1, "")),
    }[x]  # fmt: skip
    longest = max(float(_x_values(run.steps, x)[-1]) for run in runs)
    unit, name = next((unit, name) for least, unit, name in units if longest >= least)
    label = f"training time ({name})" if x == "time" else f"tokens ({name})" if name else "tokens"
    return (lambda v: v / unit), label


def draw_picture(panels: Sequence[Panel], out: Path, title: str) -> None:
    """Draw panels below each other into a PNG, SVG or PDF file, which appears whole.

    Raises:
        InputError: If the file's kind is unknown or it can't be written.
    """
    if out.suffix.lower() not in PICTURES:
        raise InputError(
            f"cannot draw a `{out.suffix or out.name}` file", f"--out {out}",
            "end the name in " + ", ".join(PICTURES),
        )  # fmt: skip
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.family": _fonts(), "font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 1.0 + 3.1 * len(panels)), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel)
        axes[-1].set_xlabel(panels[-1].x_label)
        figure.align_ylabels()
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        handles = {h.get_label(): h for axis in axes for h in axis.get_legend_handles_labels()[0]}
        figure.legend(
            handles=list(handles.values()), loc="outside lower center", frameon=False,
            ncols=1 if max(map(len, handles)) > 40 else min(4, len(handles)),
        )  # fmt: skip
        _save_whole(figure, out)


def _save_whole(figure: Any, out: Path) -> None:
    new = out.with_name(f".{out.stem}.tmp{out.suffix}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            # No font of this machine may have the characters of a run's name: boxes will do.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            figure.savefig(new)
        os.replace(new, out)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}", f"--out {out}") from error


def _fonts() -> list[str]:
    """DejaVu, then a font with Chinese characters if the machine has one."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    chinese = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "SimHei")
    return ["DejaVu Sans", *(name for name in chinese if name in installed)]


_DIAMOND = {
    "linestyle": "none",
    "marker": "D",
    "markersize": 4.5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
}


def _draw_panel(axis: Any, panel: Panel) -> None:
    """Thin pale line: each step; strong line: the running mean; diamonds: validation."""
    colours = {c.name: _COLOURS[i % len(_COLOURS)] for i, c in enumerate(panel.curves)}
    for curve in panel.curves:
        colour = colours[curve.name]
        single = "o" if np.isfinite(curve.y).sum() <= 3 else None
        axis.plot(curve.x, curve.y, color=colour, alpha=0.25, linewidth=1, marker=single)
        axis.plot(curve.x, curve.smooth, color=colour, linewidth=1.8, label=curve.name)
    for curve in panel.points:
        axis.plot(curve.x, curve.y, color=colours[curve.name], **_DIAMOND)
    if panel.points:
        axis.plot([], [], color="#6b7280", label="validation", **_DIAMOND)
    axis.set_ylabel(panel.quantity.label)
    axis.grid(visible=True, color="#e5e7eb", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)
    if panel.quantity.from_zero:
        axis.set_ylim(bottom=0)
    if panel.quantity.from_zero and axis.get_ylim()[1] >= 1000:
        axis.yaxis.set_major_formatter("{x:,.0f}")
