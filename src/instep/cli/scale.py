"""`instep scale`: how much faster is a training on more processes, and what is the rest lost to?"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli.command import TASK, VALUES, command, find_task, make_spec, option, print_json, read_worlds, say
from instep.core.errors import EXIT_DONE
from instep.core.options import PROCESSES
from instep.core.spec import TrainSpec
from instep.launch.preload import fork_forkserver

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from instep.monitor.report.tables import Table
    from instep.monitor.scaling.study import Study


@command(
    "Measure the speed of a training at several numbers of processes, in turns, and say what efficiency is lost to.",
    TASK,
    VALUES,
    option("worlds", str, "1,2,4", "the numbers of processes; all are compared with the smallest"),
    option(
        "steps",
        int | None,
        None,
        "optimizer steps of a piece; the first five do not count [default: as many as take about 4 s]",
    ),
    option("rounds", int, 4, "how often each number of processes is measured"),
    option(
        "weak",
        bool,
        False,
        "let the batch grow with the processes; --batch-size is that of the smallest number",
        "--weak",
    ),
    option("output", Path | None, None, "write a page (.html) or a figure (.svg, .png)", "-o", "--output"),
    spec=TrainSpec,
    takes=lambda option: option.in_verify or (option.group == PROCESSES and option.name != "processes"),
)
def scale(
    task: str,
    values: list[str] | None,
    worlds: str,
    steps: int | None,
    rounds: int,
    weak: bool,
    output: Path | None,
    **options: Any,
) -> int:
    """Measure how a Task scales."""
    if output is not None:
        _check_output(output)
    spec = make_spec(TrainSpec, options)
    sizes = read_worlds(worlds)
    fork_forkserver()
    made, path = find_task(task, values)

    from instep.launch.processes import check_process_count
    from instep.monitor.scaling.piece import WARM_UP_STEPS, read_piece
    from instep.monitor.scaling.study import study
    from instep.scale.pieces import ScalePlan, measure_pieces
    from instep.train.precision import resolve_precision
    from instep.train.source import TaskSource
    from instep.world.device import device_count
    from instep.world.world import place_here

    plan = ScalePlan(tuple(sizes), rounds, steps, weak, WARM_UP_STEPS)
    plan.check(spec)
    cores, gpus = len(os.sched_getaffinity(0)), device_count()
    for size in sizes:
        check_process_count(size, cores, gpus)
    spec = resolve_precision(spec, place_here().device)
    if not gpus:  # else one process would have all cores, and two half of them each
        spec = replace(spec, threads=spec.threads or 1)
    report = (lambda _: None) if spec.quiet else say
    measured = measure_pieces(TaskSource.of_file(path, made), spec, plan, read_piece, report)
    outcome = study(measured, plan.batch_sizes(spec), weak)
    _show(outcome, type(made).__name__, None if gpus else cores, output, spec.json)
    return EXIT_DONE


def _check_output(output: Path) -> None:
    """Raise SpecError for a file that could not be written in the end."""
    from instep.monitor.charts.png import require_png
    from instep.monitor.report.write import check_output

    check_output(output, (".svg", ".png"))
    if output.suffix.lower() == ".png":
        require_png()


def _show(outcome: Study, task: str, cores: int | None, output: Path | None, as_json: bool) -> None:
    """Print the outcome, and write its file."""
    from rich.console import Console

    from instep.monitor.report.write import write_bytes
    from instep.monitor.scaling import texts

    console = Console(stderr=as_json, highlight=False)
    console.print(_rich(texts.speed_table(outcome)))
    console.print(_rich(texts.loss_table(outcome)))
    for text in (*texts.sentences(outcome, cores), texts.method_text(outcome)):
        console.print(text, soft_wrap=True, markup=False)
    if output is not None:
        write_bytes(output, _file(outcome, task, cores, output.suffix.lower()))
        say(f"{output} is written")
    if as_json:
        print_json(
            {"status": "complete", "task": task, **outcome.to_json(), "text": " ".join(texts.sentences(outcome, cores))}
        )


def _file(outcome: Study, task: str, cores: int | None, ending: str) -> bytes:
    from instep.monitor.scaling.page import to_html, to_png, to_svg

    if ending == ".png":
        return to_png(outcome, task)
    text = to_svg(outcome, task) if ending == ".svg" else to_html(outcome, task, cores, time.time())
    return text.encode("utf-8", errors="replace")


def _rich(table: Table) -> RichTable:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(table.head):
        shown.add_column(name, justify="right" if number in table.numbers else "left")
    for row in table.rows:
        shown.add_row(*row)
    return shown
