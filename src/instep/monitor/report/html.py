"""A report as one HTML file. Pure."""

from __future__ import annotations

from instep.core.plural import plural
from instep.core.version import __version__
from instep.events.schema import PHASES
from instep.monitor.charts.bar_chart import Bar, BarChart, bar_chart
from instep.monitor.charts.curve import make_curve
from instep.monitor.charts.line_chart import LineChart, line_chart
from instep.monitor.charts.svg import element, escape
from instep.monitor.progress import duration
from instep.monitor.report import page, tables
from instep.monitor.report.facts import RankPhases, RunFacts
from instep.monitor.report.recipe import wrapped
from instep.monitor.report.report import Report
from instep.monitor.scaling.table import SpeedRow

_MAX_BARS = 64
"""Of more ranks than this, neighbours share a bar."""
_COLORS = {name: name for name in PHASES}


def to_html(report: Report) -> str:
    """Return the report as a page."""
    parts = [_header(report)]
    if len(report.runs) > 1:
        parts += [page.heading(2, "Runs"), page.table(tables.runs_table(report))]
    else:
        parts += _result(report.runs[0])
    if rows := report.scaling():
        parts += _scaling(rows, report.scaling_caveat())
    if charts := report.charts():
        drawn = "".join(element("figure", line_chart(chart), style="margin:0") for chart in charts)
        parts += [page.heading(2, "Curves"), element("div", drawn, class_="charts"), _note_on_curves(report)]
    for name, run in zip(report.names(), report.runs, strict=True):
        if len(report.runs) > 1:
            parts += [page.heading(2, name), *_result(run)]
        parts += _run(run, 2 if len(report.runs) == 1 else 3)
    parts.append(_footer(report))
    return page.page(f"{report.title} – instep report", parts)


def _header(report: Report) -> str:
    first = report.runs[0]
    under = plural(len(report.runs), "run")
    if len(report.runs) == 1:
        under = first.name + ("" if first.started_s is None else f" · {tables.clock_text(first.started_s)} UTC")
    badge = element("span", escape(first.status), class_=f"badge {_class_of(first)}") if len(report.runs) == 1 else ""
    over = element("p", "instep report", class_="over")
    below = element("p", badge + escape(under), class_="note")
    return element("header", over + page.heading(1, report.title) + below)


def _class_of(run: RunFacts) -> str:
    return run.status if run.status in ("complete", "preempted", "failed") else "unfinished"


def _result(run: RunFacts) -> list[str]:
    parts = [page.box(f"Not all of this run could be read: {run.damage}")] if run.damage else []
    parts.append(page.numbers(tables.key_numbers(run)))
    if run.verdict:
        title = element("strong", "What bounded the speed. ")
        parts.append(element("div", title + escape(run.verdict), class_="box verdict"))
    return parts


def _scaling(rows: list[SpeedRow], caveat: str | None) -> list[str]:
    chart = element("div", line_chart(speedup_chart(rows)) + line_chart(efficiency_chart(rows)), class_="charts")
    text = (
        "Samples per second without evaluations, checkpoints and the first steps of each attempt, compared with the "
        "smallest number of processes. Dashed: ideal."
    )
    more = [page.box(caveat)] if caveat else []
    return [
        page.heading(2, "Scaling"),
        *more,
        page.table(tables.scaling_table(rows)),
        chart,
        page.paragraph(text, "note"),
    ]


def speedup_chart(rows: list[SpeedRow]) -> LineChart:
    """Return the chart of the speed-up by world size."""
    sizes = [float(row.world_size) for row in rows]
    ideal = [(size, size / sizes[0]) for size in sizes]
    curve = make_curve("speed-up", sizes, [row.speedup for row in rows])
    return LineChart("speed-up", [curve], "processes", from_zero=True, ideal=ideal, x_ticks=sizes)


def efficiency_chart(rows: list[SpeedRow]) -> LineChart:
    """Return the chart of the efficiency by world size."""
    sizes = [float(row.world_size) for row in rows]
    curve = make_curve("efficiency", sizes, [row.efficiency for row in rows])
    ideal = [(size, 1.0) for size in sizes]
    return LineChart("efficiency", [curve], "processes", from_zero=True, ideal=ideal, x_ticks=sizes)


def _note_on_curves(report: Report) -> str:
    dense = [curve for run in report.runs for curve in run.curves.values() if curve.num_values > len(curve.points)]
    notes = []
    if dense:
        most = max(curve.num_values for curve in dense)
        notes.append(
            f"Curves of up to {most:,} values are drawn as the means of stretches; the band is least to greatest."
        )
    if len(report.runs) > 1:
        notes.append("Of curves that coincide, the last one is seen.")
    if any(chart.marks for chart in report.charts()):
        notes.append("Dashed lines are restarts.")
    return page.paragraph(" ".join(notes), "note") if notes else ""


def _run(run: RunFacts, level: int) -> list[str]:
    parts = []
    if run.phases:
        text = (
            "Host times of each rank over the whole run, restarts included. Communication is the time in which a rank "
            "waited for a transfer or for other ranks: what overlaps with computing is not in it."
        )
        parts += [page.heading(level, "Where the time went"), phases_chart(run.phases), page.paragraph(text, "note")]
        parts.append(page.table(tables.phases_table(run)))
    if run.devices:
        text = "What the sensors of each rank's accelerator said, and the phases of a step on its own clock."
        parts += [page.heading(level, "Accelerators"), page.paragraph(text, "note")]
        parts.append(page.table(tables.devices_table(run)))
    parts.append(page.heading(level, "Incidents"))
    if run.incidents:
        parts.append(page.table(tables.incidents_table(run), "times"))
    else:
        parts.append(page.paragraph("None: no restart, no notice, no failed checkpoint."))
    parts += [page.heading(level, "What ran"), _command(run), page.facts(tables.what_ran(run))]
    return parts


def _command(run: RunFacts) -> str:
    if run.recipe.command is None:
        return page.paragraph(f"There is no command to train it again: {run.recipe.why_no_command}.", "note")
    return page.paragraph("To train the same again:") + element("pre", escape(wrapped(run.recipe.command)))


def phases_chart(ranks: tuple[RankPhases, ...]) -> str:
    """Return the bars of all ranks."""
    per_bar = -(-len(ranks) // _MAX_BARS)
    bars = []
    for first in range(0, len(ranks), per_bar):
        group = ranks[first : first + per_bar]
        names = dict.fromkeys(name for rank in group for name in rank.ordered())
        mean = {name: sum(rank.phases.get(name, 0.0) for rank in group) / len(group) for name in names}
        known = {name: value for name, value in mean.items() if name in _COLORS}
        known["other"] = known.get("other", 0.0) + sum(value for name, value in mean.items() if name not in _COLORS)
        label = f"rank {group[0].rank}" + (f"–{group[-1].rank}" if len(group) > 1 else "")
        bars.append(Bar(label, known, duration(sum(rank.seconds for rank in group) / len(group))))
    return bar_chart(BarChart("seconds by phase and rank", bars, _COLORS, "seconds"))


def _footer(report: Report) -> str:
    paths = ", ".join(run.path for run in report.runs)
    text = f"Made by instep {__version__} on {tables.clock_text(report.made_s)} UTC from {paths}."
    return element("footer", escape(text))
