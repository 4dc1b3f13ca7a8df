"""A chart of curves over one axis. Pure: values in, SVG text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instep.monitor.charts.axis import Axis, linear_axis, log_axis
from instep.monitor.charts.curve import Curve, Point
from instep.monitor.charts.svg import NUM_COLORS, drawing, element, escape, path, text

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 26.0, 30.0
_LEGEND_ROW = 15.0
_LETTER = 6.6
_LONGEST_NAME = 40
_DOTS_BELOW = 40
"""Curves of fewer points show each one."""
_LOG_FROM = 30.0
"""A positive curve whose greatest value is this many times its least has a logarithmic axis, where that is allowed."""


@dataclass(frozen=True)
class LineChart:
    """What to draw."""

    title: str
    curves: Sequence[Curve]
    x_label: str = "step"
    width: float = 440.0
    height: float = 230.0
    may_log: bool = False
    from_zero: bool = False
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines: where, and what they mean."""
    ideal: Sequence[tuple[float, float]] = ()
    """A dashed line through these points."""
    x_ticks: Sequence[float] = ()
    log_x: bool = False
    """Whether the horizontal axis is logarithmic."""
    colors: Sequence[int] = ()
    """The numbers of the curves' colours; unless given, 0, 1, 2, …"""

    def color(self, number: int) -> str:
        """Return the colour of a curve."""
        return f"var(--c{(self.colors[number] if self.colors else number) % NUM_COLORS})"


def line_chart(chart: LineChart) -> str:
    """Return the chart as SVG."""
    legend = _legend(chart) if len(chart.curves) > 1 else []
    top = _TOP + _LEGEND_ROW * len(legend)
    frame = _Frame(chart, top, _x_axis(chart), _y_axis(chart))
    parts = [text(0.0, 13.0, _cut(chart.title + (" (log scale)" if frame.y.is_log else ""), 70), class_="strong")]
    parts += legend
    parts += frame.grid()
    parts += [frame.mark(x, words) for x, words in chart.marks]
    if chart.ideal:
        parts.append(element("path", d=path([frame.at(x, y) for x, y in chart.ideal]), class_="ideal"))
    for number, curve in enumerate(chart.curves):
        parts += frame.curve(curve, chart.color(number))
    return drawing(chart.width, chart.height + _LEGEND_ROW * len(legend), "".join(parts), chart.title)


def _x_axis(chart: LineChart) -> Axis:
    xs = [point.x for curve in chart.curves for point in curve.points]
    if chart.log_x:
        return log_axis(xs)
    axis = linear_axis([*xs, *(x for x, _ in chart.ideal)], count=6)
    if not chart.x_ticks:
        return axis
    return Axis(axis.low, axis.high, tuple(tick for tick in chart.x_ticks if axis.low <= tick <= axis.high))


def _y_axis(chart: LineChart) -> Axis:
    values = [v for curve in chart.curves for p in curve.points for v in (p.low, p.y, p.high) if v is not None]
    means = [p.y for curve in chart.curves for p in curve.points if p.y is not None]
    if chart.may_log and means and min(values) > 0 and max(means) > _LOG_FROM * min(means):
        return log_axis(values)
    return linear_axis([*values, *(y for _, y in chart.ideal)], from_zero=chart.from_zero)


def _legend(chart: LineChart) -> list[str]:
    """Return rows of names, each after its colour."""
    rows: list[list[str]] = [[]]
    x = _LEFT
    for number, curve in enumerate(chart.curves):
        name = _cut(curve.name, _LONGEST_NAME)
        width = 22 + _LETTER * len(name)
        if x + width > chart.width and rows[-1]:
            rows, x = [*rows, []], _LEFT
        y = 28.0 + _LEGEND_ROW * (len(rows) - 1)
        rows[-1].append(
            element("rect", x=x, y=y - 5, width=10, height=3, fill=chart.color(number)) + text(x + 14, y, name)
        )
        x += width
    return ["".join(row) for row in rows]


@dataclass(frozen=True)
class _Frame:
    """Where things lie in the drawing."""

    chart: LineChart
    top: float
    x: Axis
    y: Axis

    @property
    def _bottom(self) -> float:
        return self.chart.height + self.top - _TOP - _BOTTOM

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a value."""
        width, height = self.chart.width - _LEFT - _RIGHT, self._bottom - self.top
        return _LEFT + width * self.x.place(x), self._bottom - height * self.y.place(y)

    def grid(self) -> list[str]:
        """Return the lines and texts of both axes."""
        right, parts = self.chart.width - _RIGHT, []
        for tick, words in zip(self.y.ticks, self.y.texts(), strict=True):
            _, y = self.at(self.x.low, tick)
            parts.append(element("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
            parts.append(text(_LEFT - 6, y + 3.5, words, text_anchor="end"))
        for tick, words in zip(self.x.ticks, self.x.texts(), strict=True):
            x, _ = self.at(tick, self.y.low)
            parts.append(element("line", x1=x, x2=x, y1=self._bottom, y2=self._bottom + 4, class_="grid"))
            parts.append(text(x, self._bottom + 15, words, text_anchor="middle"))
        parts.append(element("line", x1=_LEFT, x2=right, y1=self._bottom, y2=self._bottom, class_="grid"))
        parts.append(text(right, self._bottom + 27, self.chart.x_label, text_anchor="end"))
        return parts

    def mark(self, x: float, words: str) -> str:
        """Return a vertical line."""
        place, _ = self.at(x, self.y.low)
        attributes = {"x1": place, "x2": place, "y1": self.top, "y2": self._bottom, "class_": "mark"}
        return element("line", element("title", escape(words)), **attributes)

    def curve(self, curve: Curve, color: str) -> list[str]:
        """Return a curve: the band from least to greatest, the means, and the points where there are few."""
        parts = []
        for points in _pieces(curve.points):
            line = [self.at(p.x, p.y) for p in points if p.y is not None]
            if any(p.low != p.high for p in points):
                parts.append(element("path", d=path(self._outline(points)) + "Z", class_="band", fill=color))
            parts.append(element("path", d=path(line), class_="curve", stroke=color))
            if len(curve.points) < _DOTS_BELOW or len(points) == 1:
                parts += [element("circle", cx=x, cy=y, r=2.2, fill=color) for x, y in line]
        return parts

    def _outline(self, points: Sequence[Point]) -> list[tuple[float, float]]:
        above = [self.at(p.x, p.high) for p in points if p.high is not None]
        return above + [self.at(p.x, p.low) for p in reversed(points) if p.low is not None]


def _pieces(points: Sequence[Point]) -> list[list[Point]]:
    """Return the pieces of a curve between points without a finite value."""
    pieces: list[list[Point]] = [[]]
    for point in points:
        if point.y is not None:
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _cut(words: str, length: int) -> str:
    return words if len(words) <= length else words[: length - 1] + "…"
