"""`instep tune --find NAME`: measure one setting (tune/finders), show what was found, and the command to use it."""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli.command import find_task, make_spec, option, print_json, say
from instep.core.errors import EXIT_DONE, SpecError
from instep.core.finders import check_finder
from instep.core.options import options_of
from instep.core.spec import TrainSpec
from instep.launch.preload import fork_forkserver

if TYPE_CHECKING:
    from instep.train.source import TaskSource
    from instep.train.task import Task
    from instep.tune.finders.finder import Finding

_ROUNDS = 4
_LEFT_OUT = ("run_dir", "fresh", "json", "quiet", "steps", "epochs", "keep")
"""Options of this command that say nothing about the training it is about."""
FIND_OPTIONS = (
    option("find", str | None, None, "measure one setting: lr, batch-size, workers, threads or processes"),
    option("over", str | None, None, "with --find: what to try, a range (1e-6..1) or a list (1,2,4)"),
    option("rounds", int | None, None, f"with --find: how often each candidate is timed ({_ROUNDS})"),
    option("output", Path | None, None, "with --find: write a page (.html) or a figure (.svg)", "-o", "--output"),
)
"""What `find` takes besides a Task and a spec."""


def refuse_without_find(over: str | None, rounds: int | None, output: Path | None, **_: Any) -> None:
    """Raise SpecError for options that would have no effect, because there is no --find."""
    given = {"over": over, "rounds": rounds, "output": output}
    if unused := [name for name, value in given.items() if value is not None]:
        raise SpecError(
            f"{unused[0]}={given[unused[0]]} is for --find, which is not given. Add --find, or leave it out."
        )


def find(
    task: str,
    values: Sequence[str],
    spec: TrainSpec,
    *,
    find: str,
    over: str | None,
    rounds: int | None,
    output: Path | None,
) -> int:
    """Find a setting of a file's Task, and show it; return the exit code."""
    if output is not None:
        from instep.monitor.report.write import check_output

        check_output(output, (".svg",))
    check_finder(find)  # before torch is imported
    fork_forkserver()
    made, path = find_task(task, list(values))
    from instep.train.source import TaskSource

    finding = _find(find, TaskSource.of_file(path, made), spec, over, rounds, None if spec.quiet else say)
    others = [word for word in values if word.partition("=")[0] not in finding.values]
    command = _command(finding, ["instep", "train", task, *others], spec)
    _show(finding, command, type(made).__name__, output, spec.json)
    return EXIT_DONE


def find_here(task: Task, find: str, over: str | None = None, rounds: int | None = None, **options: Any) -> Finding:
    """Find a setting from a program or a notebook: `instep.tune(task, find=…)`."""
    from instep.train.source import TaskSource, refuse_while_loading
    from instep.train.task import Task
    from instep.world.seeds import generators_restored

    refuse_while_loading("instep.tune()")
    if not isinstance(task, Task):
        raise SpecError(
            f"instep.tune got a {type(task).__name__}, and needs an instance of a Task: Digits(), for instance."
        )
    spec = make_spec(TrainSpec, {"quiet": True, **options})
    with generators_restored():
        return _find(find, TaskSource.of_value(task), spec, over, rounds, None if spec.quiet else say)


def _find(
    name: str,
    source: TaskSource,
    spec: TrainSpec,
    over: str | None,
    rounds: int | None,
    report: Callable[[str], None] | None,
) -> Finding:
    """Complete the request, and run the finder."""
    from instep.launch.processes import check_process_count
    from instep.train.precision import resolve_precision
    from instep.tune.finders.finder import FindRequest, open_finder
    from instep.world.device import device_count
    from instep.world.world import place_here

    finder = open_finder(name)
    if spec.on != "here" or spec.max_nodes > 1 or spec.hosts:
        raise SpecError("--find measures on this node alone. Leave out the options of other nodes (--on, --nnodes).")
    place = place_here()
    if place.launched and place.world_size > 1:
        raise SpecError(
            f"--find launches processes of its own, and {place.launcher} has started {place.world_size} of this "
            "command. Run it once, with -n."
        )
    processes = check_process_count(spec.processes, len(os.sched_getaffinity(0)), device_count())
    spec = resolve_precision(dataclasses.replace(spec, processes=processes), place.device)
    request = FindRequest(source, spec, over or "", _ROUNDS if rounds is None else rounds, report or (lambda _: None))
    return finder.find(request)


def _command(finding: Finding, words: Sequence[str], spec: TrainSpec) -> str | None:
    """Return the command that trains with what was found; None: nothing was, or no option or field says it."""
    if not finding.values and not finding.changes:
        return None
    defaults = {o.name: o.default for o in options_of(TrainSpec)}
    plain = {name: defaults[name] for name in _LEFT_OUT}
    fields = [f"{name}={value:g}" for name, value in finding.values.items()]
    used = dataclasses.replace(spec, **{**plain, **finding.changes})
    return shlex.join([*words, *fields, *used.words()])


def _show(finding: Finding, command: str | None, task: str, output: Path | None, as_json: bool) -> None:
    """Print what was found, and write its file."""
    from rich.console import Console

    from instep.cli.tune_find_page import rich_table, text_of_plot, to_html, to_svg
    from instep.monitor.report.write import write_text

    console = Console(stderr=as_json, highlight=False)
    for plot in () if finding.rows else finding.plots:
        console.print("\n".join(text_of_plot(plot, console.width)), markup=False, soft_wrap=True)
    if finding.rows:
        console.print(rich_table(finding))
    for text in finding.sentences:
        console.print(text, markup=False, soft_wrap=True)
    if command is not None:
        console.print(f"To train with it:\n  {command}", markup=False, soft_wrap=True)
    if output is not None:
        is_figure = output.suffix.lower() == ".svg"
        write_text(output, to_svg(finding, task) if is_figure else to_html(finding, task, command, time.time()))
        say(f"{output} is written")
    if as_json:
        outcome = {"find": finding.finder, "suggestion": finding.suggestion, "command": command}
        text = " ".join(finding.sentences)
        print_json({"status": "complete", "task": task, **outcome, "text": text, **finding.measured})
