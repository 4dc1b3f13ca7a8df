"""The evaluations of a run: metrics over whole sets, and what a loop of one's own evaluates by itself.

Ranks: all, alike.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from instep.core.errors import TaskError
from instep.core.metric_goal import MetricGoal
from instep.core.spec import TrainSpec
from instep.data.batch_plan import PartPlan
from instep.data.kinds import count_samples
from instep.events.schema import EvalRecord
from instep.events.write import EventLog
from instep.train.average import evaluated_weights
from instep.train.engine import Engine
from instep.train.evaluation import evaluate_sets, evaluation_sets, read_evaluation
from instep.train.gather import Piece, gather_rows
from instep.train.patience import Patience
from instep.train.reading import Collate, chunk_rows


class RunEvaluation:
    """The part of a `Run` that evaluates: it computes metrics, shares out batches outside of steps, gathers rows."""

    engine: Engine
    log: EventLog
    step: int
    _batch: Piece | None = None
    """The batch of `batches` under way."""
    _step_plans: Sequence[PartPlan] | None = None
    """Of this rank's parts of the step under way."""

    def __init__(self, spec: TrainSpec) -> None:
        self.spec = spec
        self.metrics: dict[str, float] = {}
        """The newest evaluation's."""
        self.evaluation: EvalRecord | None = None
        """The newest one."""
        self._evaluated_at: int | None = None
        self.patience = Patience.of(spec)

    def evaluate(
        self,
        metrics: Callable[[nn.Module, Any], dict[str, Any]],
        dataset: Any,
        collate: Collate | None = None,
        ema: bool | None = None,
    ) -> dict[str, float]:
        """Compute metrics exactly over a whole set, or a dict of sets, as in a Task; `ema=False`: not of averages."""
        if not self.engine.trained:
            raise TaskError("run.evaluate() before run.prepare(): there is no model to evaluate yet.")
        begun, sets = time.monotonic(), evaluation_sets(dataset, collate)
        trained = self.engine.trained[0]
        with evaluated_weights(trained.average, ema):
            scores = evaluate_sets(self.engine, trained.model, self.spec, self.step, metrics, sets, collate)
        self.metrics, self._evaluated_at = scores, self.step
        for trained in self.engine.trained:
            if trained.schedule is not None:
                trained.schedule.end_evaluation(scores, self.goal)
        if self.patience is not None:
            self.patience.take(scores)
        self.evaluation = EvalRecord(step=self.step, metrics=scores, seconds=round(time.monotonic() - begun, 6))
        self.log.write(self.evaluation)
        return scores

    @property
    def goal(self) -> MetricGoal | None:
        """The metric that the spec names first."""
        return self.patience.goal if self.patience is not None else MetricGoal.parse("keep_best", self.spec.keep_best)

    def _scores(self) -> dict[str, float]:
        """Return this step's evaluation, if there was one."""
        return self.metrics if self._evaluated_at == self.step else {}

    def batches(self, dataset: Any, collate: Collate | None = None, ema: bool | None = None) -> Iterator[Any]:
        """Yield this rank's batches of a whole dataset, for an evaluation of one's own; as many on all ranks.

        Every sample is in one batch that counts. A rank that has none left gets the first one again, which `gather`
        does not count. Meanwhile the models are in evaluation mode, without gradients, and have the averaged weights,
        if there are any; `ema=False`: their own. Called on all ranks.
        """
        if not self.engine.trained:
            raise TaskError("run.batches() before run.prepare(): there is no model to evaluate yet.")
        models = [trained.model for trained in self.engine.trained]
        most_rows = chunk_rows(self.spec)
        first_rows = min(most_rows, count_samples(dataset, collate, most_rows, self.spec.seed))
        chunks = read_evaluation(self.engine, models, self.spec, self.step, dataset, collate, in_step=True)
        rank = self.engine.grid.data.rank
        with contextlib.ExitStack() as stack:
            for trained in self.engine.trained:
                stack.enter_context(evaluated_weights(trained.average, ema))
            stack.enter_context(contextlib.closing(chunks))
            try:
                for batch, num_rows in chunks:
                    self._batch = Piece(rank, num_rows or first_rows, counted=num_rows > 0)
                    yield batch
            finally:
                self._batch = None

    def gather(self, values: Any) -> Any:
        """Return all ranks' rows, on every rank, in the data's order, each once. Called on all ranks.

        Within `for batch in run.batches(…)`, `values` is what was computed for the batch; within a step, a list of what
        was computed for each of `step.shards()`, and the rows are those of the global batch. Values are tensors whose
        first dimension is the samples, also nested in dicts, lists and tuples.
        """
        data = self.engine.grid.data
        if self._batch is not None:
            return gather_rows(data, [self._batch], [values])
        if self._step_plans is None:
            raise TaskError(
                "run.gather() outside of a batch: its rows are unknown. Call it in `for batch in run.batches(…)`, or "
                "in a step after `for … in step.shards()`."
            )
        if not isinstance(values, list):
            raise TaskError(
                f"run.gather() in a step got a {type(values).__name__}. Give a list with one value for each of "
                "step.shards(), after the loop over them: ranks may have different numbers of shards."
            )
        pieces = [Piece(plan.first_row, plan.num_rows, plan.counted) for plan in self._step_plans]
        return gather_rows(data, pieces, values)
