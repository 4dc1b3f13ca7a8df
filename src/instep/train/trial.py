"""Before the first step: the Task's loss and metrics on a few rows, to name now what would go wrong later.

[Note: Mean or sum]
A step's loss is the mean over the global batch, and a part counts with its share of the rows. That needs a loss which
is the mean over the rows it is given: then the loss of some rows is the mean of the losses of their halves. A sum over
the rows is the sum of those of its halves; it would train another recipe at each number of processes, and is refused.
A loss that is neither depends on how the batch is split: because each row is compared with the others, or because it is
the mean over something other than rows. In the latter case `(mean, weight)` makes it right.

Ranks: all, alike, on the same rows, for layers may communicate. All follow what rank 0 finds.
"""

import contextlib
import copy
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from instep.core.errors import TaskError
from instep.data.curricula import Curriculum
from instep.data.kinds import first_rows
from instep.data.nested import map_tensors
from instep.parallel.preserve import evaluating
from instep.parallel.strategy import HALF_DTYPES
from instep.train.curriculum import scores_in
from instep.train.evaluate import check_metrics
from instep.train.evaluation import evaluation_sets, named_metrics
from instep.train.metric_objects import is_metric
from instep.train.reading import Collate, chunk_rows, cut_batch
from instep.train.run import Run
from instep.train.scalars import loss_parts
from instep.train.task import Task

_ROWS = 8
_CLOSE = 2e-3
"""How far from the mean of its halves, in terms of the way from their mean to their sum, a loss still counts as one."""
_CLOSE_IN_HALF = 0.05
"""The same where numbers are rounded to 8 or 11 bits."""
_NOISY_CALLS = 6
"""How often a loss that draws noise is computed, to tell a sum from a mean."""
_NOISY_SUM = 0.15
"""How far from the sum of its halves such a loss still counts as their sum, if the noise is a small part of that."""

Loss = tuple[float, float | None]
"""A loss, and its weight if there is one."""


def try_loss(run: Run, task: Task, model: nn.Module, dataset: Any) -> None:
    """Raise TaskError for a loss that is a sum; log a notice if it depends on the split. Called on all ranks."""
    batch, rows = _rows_of(run, dataset, min(_ROWS, run.spec.batch_size), task.collate)
    if rows == 1:
        return
    if rows % 2:
        batch, rows = _rows_of(run, dataset, rows - 1, task.collate)
    try:
        halves = [half for _, _, half in cut_batch(batch, rows, 2)]
    except TaskError:  # its rows cannot be told apart
        return
    losses: list[Loss] = []
    # A loss may need more rows than these, or gradients. If it fails for another reason, the first step will raise it.
    with on_the_side(run, model) as seed, contextlib.suppress(Exception):
        for piece in (batch, batch, *halves):
            seed()
            losses.append(_loss(copy_of(task).loss(model, piece)))
        for piece in (batch, *halves) * (_NOISY_CALLS if losses[0] != losses[1] else 0):
            seed()
            losses.append(_loss(copy_of(task).loss(model, piece)))
    kind = run.world.broadcast_object(kind_of_loss(losses, run.engine.precision.name in HALF_DTYPES))
    if kind == "sum" and rows < _ROWS:  # of so few rows, a loss that compares them may be twice that of half of them
        kind = "neither"
    if kind == "sum":
        (whole, _), _, (first, _), (second, _) = losses[:4]
        raise TaskError(
            f"the loss of {rows} samples, {whole:.4g}, is the sum of the losses of their halves, {first:.4g} and "
            f"{second:.4g}: it would train another recipe at each number of processes. Return the mean over the "
            "samples: use reduction='mean', or divide by their number."
        )
    if kind == "neither" and not any(isinstance(m, _NormBase) and not m.track_running_stats for m in model.modules()):
        run.notice(
            "the loss of a batch is not the mean of the losses of its halves, so it depends on how a batch is split, "
            "and with it on the number of processes. If it is a mean over something other than samples (tokens, "
            "weighted classes), return (mean, weight)."
        )


def try_metrics(run: Run, metrics: Callable[[nn.Module, Any], Any], dataset: Any, collate: Collate | None) -> None:
    """Compute the metrics of a few rows; raise TaskError for what they cannot return. Called on all ranks."""
    sets, model = evaluation_sets(dataset, collate), run.engine.trained[0].model
    names: list[str] = []
    for name, data in sets.items():
        batch, rows = _rows_of(run, data, min(_ROWS, chunk_rows(run.spec)), collate)
        with on_the_side(run, model) as seed:
            seed()
            names += named_metrics([name], check_metrics(metrics(model, batch), rows, run.spec.exact))
    run.check_goals(names)


def try_difficulty(run: Run, task: Task, model: nn.Module, dataset: Any) -> None:
    """Raise TaskError for a metric by which a curriculum cannot score samples. Called on all ranks."""
    if not isinstance(dataset, Curriculum) or not isinstance(dataset.difficulty, str):
        return
    batch, rows = _rows_of(run, dataset, min(_ROWS, chunk_rows(run.spec)), task.collate)
    with on_the_side(run, model) as seed:
        seed()
        scores_in(copy_of(task).metrics(model, batch), dataset.difficulty, rows)


def copy_of(task: Task) -> Task:
    """Return a copy that may count its calls, and update its metric objects."""
    copied = copy.copy(task)
    vars(copied).update({name: copy.deepcopy(value) for name, value in vars(task).items() if is_metric(value)})
    return copied


def kind_of_loss(losses: list[Loss], is_half: bool = False) -> str:
    """Return whether a loss is a mean, a sum, neither or unknown, from that of some rows, again, and of their halves.

    It is unknown where the numbers are too small to tell. One that draws noise was computed a few times more; of it
    only a sum is recognized.
    """
    if len(losses) > 4:
        return _kind_of_noisy_loss(*([value for value, _ in losses[start::3]] for start in (4, 5, 6)))
    if len(losses) < 4 or losses[0] != losses[1]:
        return "unknown"
    (whole, _), _, (first, weight), (second, other) = losses
    mean = (first + second) / 2 if not weight or not other else (first * weight + second * other) / (weight + other)
    way = first + second - mean
    if not abs(way) > 1e-6 * max(abs(first), abs(second)):  # also if they are not finite
        return "unknown"
    position = (whole - mean) / way
    close = _CLOSE_IN_HALF if is_half else _CLOSE
    if abs(position) <= close:
        return "mean"
    return "sum" if abs(position - 1) <= _CLOSE_IN_HALF else "neither"


def _kind_of_noisy_loss(wholes: list[float], firsts: list[float], seconds: list[float]) -> str:
    if not all(map(math.isfinite, (*wholes, *firsts, *seconds))):
        return "unknown"
    whole, first, second = map(statistics.fmean, (wholes, firsts, seconds))
    half = abs(first + second) / 2
    noise = max(map(statistics.pstdev, (wholes, firsts, seconds)))
    is_sum = abs(whole - (first + second)) < 2 * _NOISY_SUM * half and noise < _NOISY_SUM * half
    return "sum" if is_sum else "unknown"


def _loss(value: Any) -> Loss:
    mean, weight, _ = loss_parts(value)
    return float(mean.detach()), None if weight is None else float(weight)


def _rows_of(run: Run, dataset: Any, most: int, collate: Collate | None) -> tuple[Any, int]:
    """Return the first rows of a dataset, and their number."""
    batch, rows = first_rows(dataset, most, collate, run.spec.seed, run.spec.on_bad_sample)
    return map_tensors(lambda tensor: tensor.to(run.world.device), batch), rows


@contextlib.contextmanager
def on_the_side(run: Run, model: nn.Module) -> Iterator[Callable[[], None]]:
    """Evaluate the model without a trace; yields a function that seeds what a call draws."""
    run.engine.context.end_part()
    with (
        torch.no_grad(),
        evaluating(model),
        run.engine.evaluation_noise(run.step) as seed,
        run.engine.precision.autocast(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield seed
