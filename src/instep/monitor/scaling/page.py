"""A scaling measurement as an HTML page, or a figure as SVG or PNG."""

from __future__ import annotations

from instep.core.interval import Estimate
from instep.core.version import __version__
from instep.monitor.charts.bar_chart import Bar, BarChart, bar_chart
from instep.monitor.charts.curve import Curve, Point, make_curve
from instep.monitor.charts.line_chart import LineChart, line_chart
from instep.monitor.charts.png import to_png as png_of
from instep.monitor.charts.svg import drawing, element, escape, standalone
from instep.monitor.report import page
from instep.monitor.report.tables import clock_text
from instep.monitor.scaling import texts
from instep.monitor.scaling.piece import CAUSES
from instep.monitor.scaling.study import Study

COLORS = {
    "communication": "communication",
    "waiting": "c6",
    "input": "data",
    "computation": "forward",
    "cores": "c4",
    "optimizer": "optimizer",
    "other": "other",
}
_MODEL_POINTS = 40
_FIGURE, _PAD = (440.0, 245.0), 16.0
_FIGURE_WIDTH = 2 * _FIGURE[0] + 3 * _PAD


def to_html(study: Study, task: str, cores: int | None, made_s: float) -> str:
    """Return the page."""
    kind = "weak scaling: the batch grows with the processes" if study.is_weak else "strong scaling: the batch stays"
    over = element("p", "instep scale", class_="over")
    head = element("header", over + page.heading(1, task) + page.paragraph(kind, "note"))
    parts = [head, *(page.paragraph(text) for text in texts.sentences(study, cores))]
    parts += [page.heading(2, "Speed and efficiency"), page.table(texts.speed_table(study))]
    charts = line_chart(speedup_chart(study)) + line_chart(efficiency_chart(study))
    parts += [element("div", charts, class_="charts"), page.paragraph(_LEGEND, "note")]
    parts += [page.heading(2, "What efficiency is lost to"), loss_chart(study), page.table(texts.loss_table(study))]
    parts.append(page.facts(list(CAUSES.items())))
    parts.append(page.paragraph("A negative share is time won: a smaller part of the batch may fit a cache.", "note"))
    parts += [page.heading(2, "How it was measured"), page.paragraph(texts.method_text(study))]
    parts.append(element("footer", escape(f"Made by instep {__version__} on {clock_text(made_s)} UTC.")))
    return page.page(f"{task} – instep scale", parts)


_LEGEND = "Measured, with the 95 % interval as a band; in the second chart also the model. Dashed: ideal."


def to_svg(study: Study, task: str) -> str:
    """Return the two charts beside each other as one SVG file."""
    return standalone(_figure(study, task))


def to_png(study: Study, task: str) -> bytes:
    """Return the same figure as a PNG file."""
    return png_of(_figure(study, task), _FIGURE_WIDTH)


def _figure(study: Study, task: str) -> str:
    width, height = _FIGURE
    pad = _PAD
    size = f'width="{width:.0f}" height="{height:.0f}" preserveAspectRatio="xMinYMin"'
    charts = (line_chart(speedup_chart(study)), line_chart(efficiency_chart(study)))
    placed = [
        chart.replace("<svg ", f'<svg x="{pad + number * (width + pad):.0f}" y="{pad:.0f}" {size} ', 1)
        for number, chart in enumerate(charts)
    ]
    back = element("rect", width="100%", height="100%", fill="var(--page)")
    return drawing(_FIGURE_WIDTH, height + 2 * pad, back + "".join(placed), f"{task}: scaling")


def speedup_chart(study: Study) -> LineChart:
    """Return the chart of the speed-up by world size."""
    sizes = _sizes(study)
    curve = _measured("measured", [(size.world_size, size.speedup) for size in study.sizes])
    ideal = [(size, size / sizes[0]) for size in sizes]
    return LineChart("speed-up", [curve], "processes", from_zero=True, ideal=ideal, x_ticks=sizes)


def efficiency_chart(study: Study) -> LineChart:
    """Return the chart of the efficiency by world size, with the model."""
    sizes = _sizes(study)
    curve = _measured("measured", [(size.world_size, size.efficiency) for size in study.sizes])
    xs = [sizes[0] + (sizes[-1] - sizes[0]) * number / _MODEL_POINTS for number in range(_MODEL_POINTS + 1)]
    model = make_curve("model", xs, [study.model.efficiency(x / sizes[0]) for x in xs])
    ideal = [(size, 1.0) for size in sizes]
    return LineChart("efficiency", [curve, model], "processes", from_zero=True, ideal=ideal, x_ticks=sizes)


def loss_chart(study: Study) -> str:
    """Return the bars of what efficiency is lost to; what is won is not drawn."""
    bars = [
        Bar(
            f"{size.world_size} processes",
            {cause: 100 * share for cause, share in size.lost_to.items()},
            f"{size.efficiency.mean:.0%} left",
        )
        for size in study.sizes[1:]
    ]
    return bar_chart(
        BarChart("percent of the time, by cause", bars, COLORS, "percent of the time", "%", with_shares=False)
    )


def _sizes(study: Study) -> list[float]:
    return [float(size.world_size) for size in study.sizes]


def _measured(name: str, values: list[tuple[int, Estimate]]) -> Curve:
    points = [
        Point(size, v.mean, v.mean if v.low is None else v.low, v.mean if v.high is None else v.high)
        for size, v in values
    ]
    return Curve(name, tuple(points), len(points))
