"""The page in a terminal: the same numbers, marks and phases of a run, drawn with characters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from instep.events.schema import PHASES
from instep.monitor.page.runs import RunIndex
from instep.monitor.page.view import RunView
from instep.monitor.progress import duration
from instep.monitor.reading import size_text

EVERY_S = 1.0
QUIET_S = 60.0
_BLOCKS = "▁▂▃▄▅▆▇█"
_NUM_MARKS = 8
_NUM_RANKS = 16
_ODD_SHARE = 0.1
_STYLES = {"complete": "green", "failed": "red", "preempted": "yellow", "training": "cyan"}
_BAD = ("nan", "hang", "divergence", "failure", "save_failed", "lost")
_LEFT_OUT = frozenset(f"rank/{rank}" for rank in range(4, 64))
"""Their lines would fill the screen; the heat map has them."""
_NUMBERS_WIDTH = 60
_ENDED = ("complete", "failed", "preempted")


def show_in_terminal(runs: RunIndex) -> None:
    """Show one run, or the list of several: live on a terminal until it ends or Ctrl-C, elsewhere once."""
    console = Console(highlight=False)
    lines = runs.summaries()
    only = runs.named[0] if len(runs.named) == 1 else lines[0]["name"] if len(lines) == 1 else None
    view = None if only is None else RunView(runs.path(only))

    def draw() -> RenderableType:
        if view is None or only is None:
            return list_of_runs(runs.summaries(), time.time())
        view.advance(float("inf"))
        return picture(only, view, console.width)

    if not console.is_terminal:
        console.print(draw(), soft_wrap=True)
        return
    with Live(draw(), console=console, auto_refresh=False) as live:
        while view is None or view.facts()["status"] not in _ENDED:
            time.sleep(EVERY_S)
            live.update(draw(), refresh=True)


def list_of_runs(lines: Iterable[Mapping[str, Any]], now_s: float) -> RenderableType:
    """Return a table of runs, the newest first."""
    grid = Grid("run", "status", "step", "loss", "metrics", "newest event", box=None, pad_edge=False)
    grid.columns[0].overflow = "fold"
    for line in lines:
        steps = f"{line.get('step', 0):,}" + (f"/{line['num_steps']:,}" if line.get("num_steps") else "")
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in (line.get("metrics") or {}).items())
        loss = "" if line.get("loss") is None else f"{line['loss']:.4g}"
        newest = f"{duration(now_s - line['time_s'])} ago" if line.get("time_s") else ""
        status = status_of(line, now_s)
        style = _STYLES.get(status, "yellow")
        grid.add_row(Text(line["name"]), Text(status, style), steps, loss, Text(metrics), newest)
    return grid


def status_of(line: Mapping[str, Any], now_s: float) -> str:
    """Return how a run is, in a word; one whose log is silent was killed, or waits."""
    if line.get("is_complete"):
        return "complete"
    status = str(line.get("status", ""))
    if status in _ENDED or not line.get("time_s") or now_s - line["time_s"] < QUIET_S:
        return status
    return f"silent for {duration(now_s - line['time_s'])}"


def picture(name: str, view: RunView, width: int) -> RenderableType:
    """Return everything about one run."""
    facts, message, verdict = view.facts(), view.message(None), view.verdict()
    assert message is not None  # all is read, and nobody has it yet
    status = status_of(facts, time.time())
    head = Text.assemble((name, "bold"), "  ", (status, _STYLES.get(status, "yellow")), "  ", (_about(facts), "dim"))
    parts: list[RenderableType] = [head]
    if facts.get("num_steps"):
        parts.append(ProgressBar(total=facts["num_steps"], completed=facts["step"], width=width))
        parts.append(Text(""))
    parts.append(Text(_position(facts)))
    if facts.get("error"):
        parts.append(Text(facts["error"], "red"))
    if message["damaged"]:
        parts.append(Text(message["damaged"], "yellow"))
    if verdict is not None:
        parts += [Text(""), Text(verdict["text"])]
    parts += [Text(""), _curves(message["tables"], width)]
    if message["phases"]:
        parts += [Text(""), _heat_map(message["phases"])]
    marks = [mark for mark in message["marks"] if mark["kind"] != "save"]
    if marks:
        marks.sort(key=lambda mark: float(mark["time_s"]))
        parts += [Text(""), *(_mark_line(mark) for mark in marks[-_NUM_MARKS:])]
    return Group(*parts)


def _about(facts: Mapping[str, Any]) -> str:
    words = [facts.get("task", "")]
    if facts.get("world_size"):
        words.append(f"{facts['world_size']} × {facts['device'].split(':')[0]}")
    if facts.get("num_restarts"):
        words.append(f"restarts: {facts['num_restarts']}")
    return ", ".join(word for word in words if word)


def _position(facts: Mapping[str, Any]) -> str:
    words = [f"step {facts['step']:,}" + (f"/{facts['num_steps']:,}" if facts.get("num_steps") else "")]
    for name, value in {**facts.get("values", {}), **facts.get("metrics", {})}.items():
        if value is not None:
            words.append(f"{name.removeprefix('scalars/')} {value:.4g}")
    if facts["samples_per_s"]:
        words.append(f"{facts['samples_per_s']:,.0f} samples/s")
    if facts["tokens_per_s"]:
        words.append(f"{facts['tokens_per_s']:,.0f} tokens/s")
    if facts["left_s"]:
        words.append(f"{duration(facts['left_s'])} left")
    return "  ".join(words)


def _curves(tables: Mapping[str, Any], width: int) -> RenderableType:
    """Return a line of blocks for each column: its course, with its least and greatest value."""
    grid = Grid("", "", "least", "greatest", "last", box=None, pad_edge=False, header_style="dim")
    for table, change in tables.items():
        if table in _LEFT_OUT:
            continue
        for column, buckets in change["series"].items():
            values = [value for bucket in buckets for value in bucket[2::3]]
            if len(values) > 1:
                form = _memory if column.endswith("_bytes") else _number
                name = column.removeprefix("scalars/") if table in ("train", "eval", "speed") else f"{table} {column}"
                numbers = [form(value) for value in (min(values), max(values), change["last"][column])]
                grid.add_row(Text(name), sparkline(values, max(width - _NUMBERS_WIDTH, 10)), *numbers)
    return grid


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a line of blocks: a column shows the one of its values that is furthest from the mean."""
    low, high, mean = min(values), max(values), sum(values) / len(values)
    width = min(width, len(values))
    marks = []
    for column in range(width):
        part = values[column * len(values) // width : (column + 1) * len(values) // width]
        value = max(part, key=lambda one: abs(one - mean))
        marks.append(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1)) if high > low else 0])
    return "".join(marks)


def _heat_map(phases: Mapping[int, Mapping[str, Any]]) -> RenderableType:
    """Return ranks × phases of the last minute; what a rank does much more of than the others is red."""
    sums = {rank: own["recent"] for rank, own in list(phases.items())[:_NUM_RANKS]}
    names = [name for name in PHASES if any(name in own["phases"] for own in sums.values())]
    shares = {
        rank: {name: own["phases"].get(name, 0.0) / own["seconds"] if own["seconds"] else 0.0 for name in names}
        for rank, own in sums.items()
    }
    medians = {name: sorted(own[name] for own in shares.values())[(len(shares) - 1) // 2] for name in names}
    grid = Grid("rank", *names, box=None, pad_edge=False, header_style="dim")
    for column in grid.columns:
        column.justify = "right"
    for rank, own in shares.items():
        cells = [_cell(name, own[name], medians[name], len(shares) > 1) for name in names]
        grid.add_row(str(rank), *cells)
    return grid


def _cell(name: str, share: float, median: float, has_others: bool) -> Text:
    is_odd = has_others and name != "communication" and share - median >= _ODD_SHARE
    return Text(f"{share:.0%}", "bold red" if is_odd else "bold" if share >= 0.3 else "" if share >= 0.01 else "dim")


def _mark_line(mark: Mapping[str, Any]) -> Text:
    style = "red" if mark["kind"] in _BAD else "magenta" if mark["kind"] in ("restart", "join", "leave") else ""
    when = f"{duration(mark['time_s']):>7}  step {mark['step']:,}  "
    return Text.assemble((when, "dim"), (f"{mark['kind']}: ", style), mark["text"])


def _number(value: float) -> str:
    return f"{value:.4g}"


def _memory(value: float) -> str:
    return size_text(round(value))
