"""A finding on a terminal, as a page and as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.core.version import __version__
from instep.monitor.charts.curve import Curve, Point, make_curve
from instep.monitor.charts.line_chart import LineChart, line_chart
from instep.monitor.charts.svg import element, escape, standalone
from instep.monitor.charts.text_chart import text_chart
from instep.monitor.report import page
from instep.monitor.report.tables import Table, clock_text

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from instep.tune.finders.finder import Finding, Plot, Series

_MARGIN = 12
_WIDEST = 72


def text_of_plot(plot: Plot, width: int) -> list[str]:
    """Return a plot as lines of text: its last curve, which is the smoothed one if there are two."""
    series = plot.series[-1]
    marks = [x for x, _ in plot.marks]
    lines = text_chart(series.xs, series.ys, marks, width=max(20, min(_WIDEST, width - _MARGIN)))
    return [plot.title, *lines]


def rich_table(finding: Finding) -> RichTable:
    """Return the table of what was measured."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for name in finding.head:
        shown.add_column(name, justify="right")
    for row in finding.rows:
        shown.add_row(*row)
    return shown


def to_html(finding: Finding, task: str, command: str | None, made_s: float) -> str:
    """Return the page of a finding."""
    over = element("p", escape(f"instep tune --find {finding.finder}"), class_="over")
    parts = [element("header", over + page.heading(1, task)), *(page.paragraph(text) for text in finding.sentences)]
    if command is not None:
        parts.append(element("pre", escape(command)))
    if finding.plots:
        parts.append(element("div", "".join(line_chart(_chart(plot)) for plot in finding.plots), class_="charts"))
    if finding.rows:
        parts.append(page.table(Table(finding.head, finding.rows, frozenset(range(len(finding.head))))))
    parts.append(element("footer", escape(f"Made by instep {__version__} on {clock_text(made_s)} UTC.")))
    return page.page(f"{task} – instep tune --find {finding.finder}", parts)


def to_svg(finding: Finding, task: str) -> str:
    """Return the first plot as an SVG file; without one, a plot without a curve that says what was found."""
    chart = _chart(finding.plots[0]) if finding.plots else LineChart(finding.sentences[0], [])
    return standalone(line_chart(LineChart(**{**vars(chart), "title": f"{task}: {chart.title}"})))


def _chart(plot: Plot) -> LineChart:
    return LineChart(plot.title, [_curve(series) for series in plot.series], plot.x_label, log_x=True, marks=plot.marks)


def _curve(series: Series) -> Curve:
    if not series.lows:
        return make_curve(series.name, series.xs, series.ys)
    points = [
        Point(x, y, y if low is None else low, y if high is None else high)
        for x, y, low, high in zip(series.xs, series.ys, series.lows, series.highs, strict=True)
    ]
    return Curve(series.name, tuple(points), len(points))
