"""What a loop of one's own evaluates by itself: the batches of a dataset, and what all ranks computed for them.

Ranks: all, alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from instep.core.errors import TaskError
from instep.core.spec import TrainSpec
from instep.data.kinds import count_samples
from instep.data.loader import Part
from instep.train.average import evaluated_weights
from instep.train.engine import Engine
from instep.train.evaluation import read_evaluation
from instep.train.gather import Piece, gather_rows
from instep.train.reading import Collate, chunk_rows


class OwnEvaluation:
    """The part of a `Run` that shares out batches outside of steps, and gathers rows."""

    engine: Engine
    spec: TrainSpec
    step: int
    _batch: Piece | None = None
    """The batch of `batches` under way."""
    _step_pieces: Sequence[Piece] | None = None
    """This rank's parts of the step under way."""

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
        if self._step_pieces is None:
            raise TaskError(
                "run.gather() outside of a batch: its rows are unknown. Call it in `for batch in run.batches(…)`, or "
                "in a step after `for … in step.shards()`."
            )
        if not isinstance(values, list):
            raise TaskError(
                f"run.gather() in a step got a {type(values).__name__}. Give a list with one value for each of "
                "step.shards(), after the loop over them: ranks may have different numbers of shards."
            )
        return gather_rows(data, self._step_pieces, values)

    def _begin_gather(self, parts: Sequence[Part]) -> None:
        """Note the parts of a step."""
        self._step_pieces = [Piece(plan.first_row, plan.num_rows, plan.counted) for plan, _ in parts]
