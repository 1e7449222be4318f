"""Curves of runs as text, for terminals and logs.

Draws the panels that `plot` arranges. plotext is imported when something is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from msllm.engine.training.plot import Panel


def draw_terminal(
    panels: Sequence[Panel],
    width: int = 80,
    height: int = 16,
    colour: bool = False,
    encoding: str = "utf-8",
) -> str:
    """Draw panels as text, `width` columns wide and `height` lines each.

    Without `colour` there is no escape sequence in the text; each run then has a marker of its
    own. Where `encoding` lacks line-drawing characters, plain ASCII is used.
    """
    unicode = _can_encode("⠿─│", encoding)
    drawn = [_draw_text(panel, width, height, colour, unicode) for panel in panels]
    text = "\n".join(drawn)
    return text if unicode else text.translate(_ASCII).encode("ascii", "replace").decode()


_ASCII = str.maketrans("─│┌┐└┘├┤┬┴┼", "-|+++++++++")
_MARKERS = "*o+x#@%&"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _draw_text(panel: Panel, width: int, height: int, colour: bool, unicode: bool) -> str:
    import plotext

    figure = plotext.figure
    figure.clear()
    plotext.terminal.limit(False, False)
    figure.theme("simple" if colour else "colorless")
    for curve, marker in zip(panel.curves, _markers(panel, unicode), strict=True):
        known = np.isfinite(curve.smooth)
        if known.any():
            x, y = curve.x[known].tolist(), curve.smooth[known].tolist()
            signal = figure.signal(x, y, marker=marker)
            signal.lines()
            figure.draw(signal)
    figure.title(panel.quantity.label)
    figure.label(panel.x_label)
    _set_ticks(figure.ruler("x"), [c.x for c in panel.curves], width // 16, from_zero=False)
    _set_ticks(figure.ruler("y"), [c.smooth for c in panel.curves], 5, panel.quantity.from_zero)
    figure.plot_size(width, height)
    text = str(figure.build())
    figure.clear()
    lines = (text if colour else _ESCAPE.sub("", text)).splitlines()
    return "\n".join([*(line.rstrip() for line in lines), *_legend(panel, unicode), ""])


def _markers(panel: Panel, unicode: bool) -> list[str]:
    """One curve is drawn as finely as the terminal can; several get a character each."""
    if len(panel.curves) == 1 and unicode:
        return ["braille"]
    return [_MARKERS[i % len(_MARKERS)] for i in range(len(panel.curves))]


def _legend(panel: Panel, unicode: bool) -> list[str]:
    if len(panel.curves) == 1:
        return []
    named = zip(_markers(panel, unicode), panel.curves, strict=True)
    return ["   " + "   ".join(f"{marker} {curve.name}" for marker, curve in named)]


def _set_ticks(ruler: Any, values: Sequence[np.ndarray], number: int, from_zero: bool) -> None:
    """Put round numbers on an axis."""
    from matplotlib.ticker import MaxNLocator

    known = np.concatenate([v[np.isfinite(v)] for v in values])
    if known.size == 0:
        return
    low, high = (0.0 if from_zero else float(known.min())), float(known.max())
    if low == high:
        low, high = low - (abs(low) / 10 or 1.0), high + (abs(high) / 10 or 1.0)
    ruler.lim(low, high)
    ticks = [t for t in MaxNLocator(max(2, number)).tick_values(low, high) if low <= t <= high]
    ruler.ticks([float(t) for t in ticks], [f"{t:,.10g}" for t in ticks])
