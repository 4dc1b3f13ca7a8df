"""`instep report`: one file about one or several runs, to attach to a ticket or a paper."""

from __future__ import annotations

import json as json_text
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from instep.cli.command import argument, command, option, print_json, say
from instep.core.errors import EXIT_DONE, SpecError
from instep.core.plural import plural
from instep.monitor.charts.curve import MAX_POINTS
from instep.monitor.reading import size_text
from instep.monitor.report.collect import collect
from instep.monitor.report.html import to_html
from instep.monitor.report.markdown import to_markdown
from instep.monitor.report.report import Report
from instep.monitor.report.write import check_writable, write_text

FORMATS: Mapping[str, tuple[str, Callable[[Report], str]]] = {
    "html": (".html", to_html),
    "markdown": (".md", to_markdown),
    "json": (".json", lambda report: json_text.dumps(report.to_json(), indent=1) + "\n"),
}
"""The ending of the file's name, and what writes its text."""
_ENDINGS = {".html": "html", ".htm": "html", ".md": "markdown", ".markdown": "markdown", ".json": "json"}
_MAX_POINTS_IN_ALL = 2000
_FEWEST_POINTS = 60


@command(
    "Write a report of runs: results, curves, where the time went, incidents, and how to train the same again.",
    argument("runs", list[Path], "RUN", "run directories; of several, the curves share their charts"),
    option(
        "output", Path | None, None, "the file to write; - is standard output [default: report.html]", "-o", "--output"
    ),
    option(
        "format",
        Literal["html", "markdown", "json"] | None,
        None,
        "html: one file that needs no other; markdown: its tables; json: its numbers (by the file's ending, or html)",
    ),
    option("json", bool, False, "print where the report is as one line of JSON", "--json"),
)
def report(runs: list[Path], output: Path | None, format: str | None, json: bool) -> int:
    """Write a report."""
    to_stdout = output is not None and str(output) == "-"
    if to_stdout and json:
        raise SpecError("output=- and --json both want standard output. Use --format json for the report as JSON.")
    kind = format or _format_of(output if not to_stdout else None)
    ending, render = FORMATS[kind]
    path = output or Path(f"report{ending}")
    if not to_stdout:
        check_writable(path)
    different = list({run.resolve(): run for run in reversed(runs)}.values())[::-1]
    points = max(_FEWEST_POINTS, min(MAX_POINTS, _MAX_POINTS_IN_ALL // len(different)))
    made = Report(tuple(collect(run, points) for run in different), time.time())
    for run in made.runs:
        if run.damage:
            say(f"notice: {run.name}: not all could be read: {run.damage}")
    text = render(made)
    if to_stdout:
        print(text, end="")
        return EXIT_DONE
    num_bytes = write_text(path, text)
    say(f"{path}: {plural(len(made.runs), 'run')}, {size_text(num_bytes)}")
    if json:
        damaged = [run.path for run in made.runs if run.damage]
        print_json({"status": "complete", "file": str(path), "format": kind, "bytes": num_bytes, "damaged": damaged})
    return EXIT_DONE


def _format_of(output: Path | None) -> str:
    """Return the format that a file's ending asks for."""
    ending = "" if output is None else output.suffix.lower()
    if ending and ending not in _ENDINGS:
        raise SpecError(
            f"output={output} ends in {ending}, which is no format of a report. Use {', '.join(_ENDINGS)}, or name the "
            f"format: --format {' or '.join(FORMATS)}."
        )
    return _ENDINGS.get(ending, "html")
