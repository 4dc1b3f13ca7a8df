"""Stacked bars, one below the other. Pure: values in, SVG text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from instep.monitor.charts.axis import is_drawn, linear_axis
from instep.monitor.charts.svg import drawing, element, escape, text

_LEFT, _RIGHT, _TOP, _BOTTOM = 84.0, 62.0, 22.0, 30.0
_LEGEND_ROW = 16.0
_LETTER = 6.2
_LABELLED_FROM = 34.0
"""Pixels of a segment that has its share written into it."""


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its segments by name, and what is written at its end."""

    name: str
    segments: Mapping[str, float]
    end: str = ""


@dataclass(frozen=True)
class BarChart:
    """What to draw; `colors` has the variable of each segment's colour, in the order of the segments."""

    title: str
    bars: Sequence[Bar]
    colors: Mapping[str, str]
    x_label: str
    unit: str = "s"
    with_shares: bool = True
    """Whether a segment shows its share of the bar, or its value."""
    width: float = 900.0


def bar_chart(chart: BarChart) -> str:
    """Return the chart as SVG. Segments that are not positive are left out."""
    names = [name for name in chart.colors if any(_is_shown(bar.segments.get(name)) for bar in chart.bars)]
    totals = [sum(value for value in bar.segments.values() if _is_shown(value)) for bar in chart.bars]
    thick = 20.0 if len(chart.bars) <= 16 else 12.0
    gap = 6.0 if len(chart.bars) <= 16 else 3.0
    legend, num_rows = _legend(names, chart)
    top = _TOP + _LEGEND_ROW * num_rows
    bottom = top + len(chart.bars) * (thick + gap)
    axis = linear_axis(totals, count=7, from_zero=True)
    width = chart.width - _LEFT - _RIGHT
    parts = [text(0.0, 13.0, chart.title, class_="strong"), legend]
    for tick, words in zip(axis.ticks, axis.texts(), strict=True):
        x = _LEFT + width * axis.place(tick)
        parts.append(element("line", x1=x, x2=x, y1=top - 2, y2=bottom, class_="grid"))
        parts.append(text(x, bottom + 13, words, text_anchor="middle"))
    parts.append(text(chart.width - _RIGHT, bottom + 27, chart.x_label, text_anchor="end"))
    for number, (bar, total) in enumerate(zip(chart.bars, totals, strict=True)):
        y = top + number * (thick + gap)
        parts.append(text(_LEFT - 8, y + thick / 2 + 4, bar.name, text_anchor="end"))
        x = _LEFT
        for name in names:
            value = bar.segments.get(name, 0.0)
            if _is_shown(value):
                long = width * (axis.place(value) - axis.place(0.0))
                parts.append(_segment(chart, name, value, total, (x, y, long, thick)))
                x += long
        parts.append(text(x + 6, y + thick / 2 + 4, bar.end))
    return drawing(chart.width, bottom + _BOTTOM, "".join(parts), chart.title)


def _is_shown(value: float | None) -> bool:
    return value is not None and is_drawn(value) and value > 0


def _segment(chart: BarChart, name: str, value: float, total: float, box: tuple[float, float, float, float]) -> str:
    x, y, long, thick = box
    share = f", {value / total:.1%}" if chart.with_shares else ""
    told = element("title", escape(f"{name}: {value:.3g} {chart.unit}{share}"))
    color = f"var(--{chart.colors[name]})"
    shown = element(
        "rect", told, x=x, y=y, width=max(long, 0.1), height=thick, fill=color, stroke="var(--page)", stroke_width=0.5
    )
    if long < _LABELLED_FROM or thick < 16:
        return shown
    label = f"{value / total:.0%}" if chart.with_shares else f"{value:.0f}{chart.unit}"
    return shown + text(x + long / 2, y + thick / 2 + 4, label, text_anchor="middle", class_="on")


def _legend(names: Sequence[str], chart: BarChart) -> tuple[str, int]:
    parts, x, row = [], _LEFT, 0
    for name in names:
        width = 24 + _LETTER * len(name)
        if x + width > chart.width and x > _LEFT:
            x, row = _LEFT, row + 1
        y = 30 + _LEGEND_ROW * row
        parts.append(element("rect", x=x, y=y - 8, width=9, height=9, fill=f"var(--{chart.colors[name]})"))
        parts.append(text(x + 13, y, name))
        x += width
    return "".join(parts), row + 1
