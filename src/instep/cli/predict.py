"""`instep predict`: what a checkpoint predicts for every sample of a set, in the data's order."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli.command import VALUES, command, option, print_json, say
from instep.cli.evaluate import RUN, THE_RUNS_OWN, WHICH, request_of
from instep.core.errors import EXIT_DONE, Interrupted
from instep.core.plural import plural
from instep.core.spec import TrainSpec

if TYPE_CHECKING:
    from instep.cli.checkpoint_job import CheckpointRequest
    from instep.train.checkpoint_result import PredictResult
    from instep.train.task import Task


@command(
    "Write what a run's checkpoint predicts to a file: every sample once, in the data's order.",
    RUN,
    VALUES,
    option("out", Path, ..., "the file to write: .parquet, .npz, .jsonl or .csv", metavar="FILE"),
    *WHICH,
    option("force", bool, False, "replace the file, if it exists", "--force"),
    spec=TrainSpec,
    takes=lambda option: option.in_evaluate,
    instead=THE_RUNS_OWN,
)
def predict(out: Path, force: bool, json: bool, **options: Any) -> int:
    """Write the predictions of a checkpoint."""
    result, is_main = _predict(request_of(json=json, **options), out, force)
    if is_main:
        columns = ", ".join(["index", *result.columns])
        say(f"{result.out}: {plural(result.num_samples, 'row')} of {columns} (step {result.step})")
        if json:
            print_json(result.to_json())
    return EXIT_DONE


def predict_here(
    run_dir: str | Path,
    out: str | Path,
    *,
    checkpoint: str | int = "last",
    data: Any = "eval",
    ema: bool | None = None,
    task: Task | str | None = None,
    force: bool = False,
    **options: Any,
) -> PredictResult:
    """Write the predictions of a run's checkpoint from a program or a notebook; see docs/reference/result.md."""
    from instep.cli.checkpoint_job import CheckpointRequest, from_python

    which = {"checkpoint": checkpoint, "data": data, "ema": ema, "task": task}
    request = CheckpointRequest(run=Path(run_dir), **which, options=options)
    result: PredictResult = from_python(lambda: _predict(request, Path(out), force)[0])
    return result


def _predict(request: CheckpointRequest, out: Path, force: bool) -> tuple[PredictResult, bool]:
    """Predict on all ranks, and write their parts to one file; return also whether this process reports the result."""
    from instep.train.checkpoint_job import predict_rank
    from instep.train.checkpoint_result import PredictResult
    from instep.train.predictions.columns import Column
    from instep.train.predictions.output import PredictionOutput
    from instep.train.predictions.parts import Parts

    output = PredictionOutput(out, force)
    prepared = request.prepare()
    is_main = prepared.place.is_main
    job = dataclasses.replace(prepared.job, parts=str(output.parts), allows_ragged=output.format.allows_ragged)
    with ExitStack() as stack:
        if is_main:
            stack.enter_context(output.open())
        try:
            computed = dataclasses.replace(prepared, job=job).run(predict_rank)
            columns = [Column.from_json(fields) for fields in computed.pop("columns")]
            parts = Parts(output.parts, columns, computed.pop("num_parts"), computed.pop("num_chunks"))
            if is_main:
                output.complete(parts, _display(job.spec.quiet, stack))
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted. {out} was not written.") from None
    names = [column.name for column in columns]
    return PredictResult(out=str(out), columns=names, run_dir=str(request.run), **computed), is_main


def _display(is_quiet: bool, stack: ExitStack) -> Any:
    """Return what shows how much of the file is written."""
    from instep.monitor.reading import WritingDisplay

    return (lambda _: None) if is_quiet else stack.enter_context(WritingDisplay("predictions"))
