"""A report as Markdown: the same tables, without the curves. Pure."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from instep.core.version import __version__
from instep.monitor.report import tables
from instep.monitor.report.facts import RunFacts
from instep.monitor.report.recipe import wrapped
from instep.monitor.report.report import Report
from instep.monitor.report.tables import Table

_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$!])")


def to_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    lines = [f"# {escape(report.title)}", ""]
    if len(report.runs) > 1:
        lines += ["## Runs", "", *render(tables.runs_table(report)), ""]
    if rows := report.scaling():
        caveat = report.scaling_caveat()
        lines += ["## Scaling", "", *([escape(caveat), ""] if caveat else []), *render(tables.scaling_table(rows)), ""]
    for name, run in zip(report.names(), report.runs, strict=True):
        lines += _run(name, run)
    made = f"Made by instep {__version__} on {tables.clock_text(report.made_s)} UTC."
    return "\n".join([*lines, made, ""])


def _run(name: str, run: RunFacts) -> list[str]:
    lines = [f"## {escape(name)}: {escape(run.status)}", ""]
    if run.damage:
        lines += [f"> Not all of this run could be read: {escape(run.damage)}", ""]
    numbers = tables.key_numbers(run)
    heads, values = tuple(name for name, _ in numbers), tuple(text for _, text in numbers)
    lines += [*render(Table(heads, (values,), frozenset(range(len(heads))))), ""]
    if run.verdict:
        lines += [f"**What bounded the speed.** {escape(run.verdict)}", ""]
    if run.phases:
        lines += ["### Where the time went", "", *render(tables.phases_table(run)), ""]
    if run.devices:
        lines += ["### Accelerators", "", *render(tables.devices_table(run)), ""]
    lines += ["### Incidents", ""]
    lines += [*render(tables.incidents_table(run)), ""] if run.incidents else ["None.", ""]
    lines += ["### What ran", ""]
    if run.recipe.command is not None:
        fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", run.recipe.command)), default=0))
        lines += [f"{fence}sh", wrapped(run.recipe.command), fence, ""]
    else:
        lines += [f"There is no command to train it again: {escape(run.recipe.why_no_command)}.", ""]
    return [*lines, *render(Table(("", ""), tuple(tables.what_ran(run)))), ""]


def render(table: Table) -> list[str]:
    """Return the lines of a table."""
    marks = ["---:" if number in table.numbers else "---" for number in range(len(table.head))]
    return [
        _row([escape(text) for text in table.head]),
        _row(marks),
        *(_row([escape(t) for t in r]) for r in table.rows),
    ]


def escape(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return _SPECIAL.sub(r"\\\1", html.escape(shown, quote=False))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
