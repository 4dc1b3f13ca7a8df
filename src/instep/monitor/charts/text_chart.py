"""A curve as lines of text, for a terminal. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from instep.monitor.charts.axis import is_drawn, log_axis, number_text

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a Braille character, by row and column of its dots."""
_BLANK = 0x2800
_ROOM = 3
"""How many times the span of most of a curve is shown: what diverges would flatten the rest."""


def text_chart(
    xs: Sequence[float], ys: Sequence[float], marks: Sequence[float] = (), width: int = 64, height: int = 10
) -> list[str]:
    """Return a curve over a logarithmic axis in `height` lines, and the axis below; marks are `^` under it."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if is_drawn(y) and x > 0]
    if not points:
        return []
    axis, (low, high) = log_axis([x for x, _ in points]), _limits([y for _, y in points])
    cells = [[0] * width for _ in range(height)]
    for x, y in points:
        column = round(axis.place(x) * (2 * width - 1))
        place = (y - low) / (high - low) if high > low else 0.5
        row = round((1 - min(1.0, max(0.0, place))) * (4 * height - 1))
        cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    labels = {0: number_text(high, 3), height - 1: number_text(low, 3)}
    room = max(map(len, labels.values()))
    rows = [
        f"{labels.get(i, ''):>{room}} │" + "".join(chr(_BLANK + dots) for dots in row) for i, row in enumerate(cells)
    ]
    under = [" "] * width
    for mark in marks:
        under[round(axis.place(mark) * (width - 1))] = "^"
    ends = number_text(axis.low, 2), number_text(axis.high, 2)
    rows.append(" " * room + " └" + "─" * width)
    if marks:
        rows.append(" " * (room + 2) + "".join(under).rstrip())
    rows.append(" " * (room + 2) + ends[0] + ends[1].rjust(width - len(ends[0])))
    return rows


def _limits(ys: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value to show; what lies far above most of them is drawn at the top."""
    ordered = sorted(ys)
    low, usual = ordered[0], ordered[math.floor(0.8 * (len(ordered) - 1))]
    return low, min(ordered[-1], low + _ROOM * (usual - low)) if usual > low else ordered[-1]
