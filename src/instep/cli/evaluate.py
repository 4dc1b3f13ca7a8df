"""`instep evaluate`: the metrics of a checkpoint, over the whole evaluation set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli.command import VALUES, argument, command, option, print_json
from instep.core.errors import EXIT_DONE
from instep.core.options import options_of
from instep.core.plural import plural
from instep.core.spec import TrainSpec
from instep.launch.preload import fork_forkserver

if TYPE_CHECKING:
    from instep.cli.checkpoint_job import CheckpointRequest
    from instep.train.checkpoint_result import EvaluateResult
    from instep.train.task import Task

RUN = argument("run", Path, "RUN", "the directory of a run, which may still be training")
WHICH = (
    option("checkpoint", str, "last", "last, best, best:METRIC, or the number of a step", metavar="WHICH"),
    option("data", str, "eval", "eval, the name of an evaluation set, train, or FILE.py:function", metavar="DATA"),
    option(
        "ema",
        bool | None,
        None,
        "use the averaged weights of a run with --ema, or not [default: if it has any]",
        "--ema/--no-ema",
    ),
    option(
        "task", str | None, None, "the file of the Task, if it is not where the run says", metavar="FILE.py[:Class]"
    ),
)
OUTPUT_OPTIONS = ("json", "quiet")
THE_RUNS_OWN = {
    o.name: {"default": None, "help": o.help.partition(" (default")[0] + " [default: the run's own]"}
    for o in options_of(TrainSpec)
    if o.in_evaluate and o.name not in OUTPUT_OPTIONS
}
"""How options of a training read here: without a value they are the run's."""


@command(
    "Compute the metrics of a run's checkpoint, exactly over the whole set.",
    RUN,
    VALUES,
    *WHICH,
    spec=TrainSpec,
    takes=lambda option: option.in_evaluate,
    instead=THE_RUNS_OWN,
)
def evaluate(json: bool, **options: Any) -> int:
    """Print the metrics of a checkpoint."""
    prepared, result = _evaluate(request_of(json=json, **options))
    if prepared.place.is_main:
        _show(result, type(prepared.task).__name__, json)
    return EXIT_DONE


def request_of(
    run: Path,
    values: list[str] | None,
    checkpoint: str,
    data: str,
    ema: bool | None,
    task: str | None,
    **options: Any,
) -> CheckpointRequest:
    """Return what a command line asks for; what is not a parameter here is an option in place of the run's."""
    fork_forkserver()
    from instep.cli.checkpoint_job import CheckpointRequest

    return CheckpointRequest(
        run=run,
        checkpoint=checkpoint,
        data=data,
        ema=ema,
        task=task,
        values=values or (),
        options=options,
        supervised=True,
    )


def evaluate_here(
    run_dir: str | Path,
    *,
    checkpoint: str | int = "last",
    data: Any = "eval",
    ema: bool | None = None,
    task: Task | str | None = None,
    **options: Any,
) -> EvaluateResult:
    """Compute the metrics of a run's checkpoint from a program or a notebook; see docs/reference/result.md."""
    from instep.cli.checkpoint_job import CheckpointRequest, from_python

    which = {"checkpoint": checkpoint, "data": data, "ema": ema, "task": task}
    request = CheckpointRequest(run=Path(run_dir), **which, options=options)
    result: EvaluateResult = from_python(lambda: _evaluate(request)[1])
    return result


def _evaluate(request: CheckpointRequest) -> tuple[Any, EvaluateResult]:
    from instep.train.checkpoint_job import evaluate_rank
    from instep.train.checkpoint_result import EvaluateResult

    prepared = request.prepare()
    return prepared, EvaluateResult(run_dir=str(request.run), **prepared.run(evaluate_rank))


def _show(result: EvaluateResult, task: str, as_json: bool) -> None:
    """Print a table; with --json the object."""
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False)
    ranks = plural(result.world_size, "process", "processes")
    console.print(
        f"{task}, step {result.step}: {plural(result.num_samples, 'sample')}, {ranks}", markup=False, soft_wrap=True
    )
    width = max(map(len, result.metrics), default=0)
    for name, value in result.metrics.items():
        console.print(f"  {name:<{width}}  {value:.6g}", markup=False, soft_wrap=True)
    console.print(result.checkpoint, markup=False, soft_wrap=True)
    if as_json:
        print_json(result.to_json())
