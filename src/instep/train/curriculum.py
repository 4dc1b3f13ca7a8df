"""The scores that a run's curriculum is ordered by: by a function of a sample, or by the model after every few epochs.

[Note: Scores of a curriculum]
The order is a function of (seed, epoch, position) and of the scores that hold in the epoch. Scores by a function are
computed once, each rank a contiguous part of the samples. The model scores all samples between two epochs,
as an evaluation does, when every batch of the epoch that ended has been trained on and none of the next one was read.
Either way all ranks then have all scores, and a checkpoint holds the newest: a run that continues, at any world size,
has the order that it would have had.

Ranks: all, alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from instep.checkpoint.files import Checkpoint
from instep.core.errors import CheckpointError, DataError, TaskError
from instep.core.spec import TrainSpec
from instep.core.tree import run_of
from instep.data.curricula import Curriculum, check_scores, score_samples
from instep.data.loader import GlobalBatch
from instep.data.ordered import OrderedDataset
from instep.data.orders.curriculum import Scores
from instep.guard.pulse import Phase, here
from instep.train.checkpoint_part import CheckpointPart
from instep.train.engine import Engine
from instep.train.evaluation import MetricsOfModel, read_evaluation
from instep.train.gather import Piece, gather_rows
from instep.train.reading import BatchReader, Collate, load_options

_QUIET_S = 2.0
"""How long scoring may take before the log says so,"""
_REPORT_S = 10.0
"""and how often it does then."""


class CurriculumScores:
    """The newest scores of a curriculum; its state is checkpointed."""

    def __init__(
        self,
        engine: Engine,
        spec: TrainSpec,
        curriculum: Curriculum,
        collate: Collate | None,
        metrics: MetricsOfModel | None,
    ) -> None:
        """`metrics` returns what the model scores samples by; None: there is nothing."""
        if metrics is None or not isinstance(curriculum.difficulty, str):
            curriculum.check_difficulty()
        self.curriculum = curriculum
        self._engine, self._spec, self._collate, self._metrics = engine, spec, collate, metrics
        self._scores: Scores | None = None
        self._first_epoch = -1
        """From which epoch on the scores hold."""

    def dataset(self) -> OrderedDataset:
        """Return the samples in the order of the scores that hold in each epoch."""
        return self.curriculum.with_scores(self._scores_of)

    def part(self) -> CheckpointPart:
        """Return the part of a checkpoint for the scores."""
        return CheckpointPart("curriculum", self._state, self._restore, is_optional=True)

    def batches(self, reader: BatchReader, first: int, last: int) -> Iterator[GlobalBatch]:
        """Yield the batches of steps first..last-1; score the samples where that is due. Called on all ranks."""
        steps_per_epoch = reader.loader.steps_per_epoch
        assert steps_per_epoch is not None
        while first < last:
            epoch = first // steps_per_epoch
            self._update(first, epoch, steps_per_epoch)
            following = self._next_scoring(epoch, steps_per_epoch)
            end = last if following is None else min(last, following * steps_per_epoch)
            # No further: the next epoch's order is not known yet, and nothing of it may be read ahead.
            yield from reader.batches(first, end)
            first = end

    def _next_scoring(self, epoch: int, steps_per_epoch: int) -> int | None:
        """Return the first epoch after this one before which the model scores; None: there is none."""
        every, pacing = self.curriculum.rescore, self.curriculum.pacing
        if not every:
            return None
        following = (epoch // every + 1) * every
        is_over = pacing.fraction(1.0) == 1.0 and following >= pacing.num_epochs(steps_per_epoch)
        return None if is_over else following

    def _update(self, step: int, epoch: int, steps_per_epoch: int) -> None:
        """Compute the scores that hold in an epoch, unless they are known. Called on all ranks."""
        every = self.curriculum.rescore
        if not every and self._scores is None:
            self._scores, self._first_epoch = self._lasting_scores(), 0
        elif every and epoch >= every:
            begin = epoch // every * every
            if begin == self._first_epoch or self._next_scoring(begin - 1, steps_per_epoch) != begin:
                return
            self._scores, self._first_epoch = self._scores_by_model(step), begin
            here().beat(Phase.DATA)

    def _scores_of(self, epoch: int) -> tuple[int, Scores]:
        assert self._scores is not None
        assert self._first_epoch <= epoch
        return self._first_epoch, self._scores

    def _lasting_scores(self) -> Scores:
        """Return the scores that were given, or a function's."""
        given = self.curriculum.scores
        if given is None:
            return self._scores_by_function()
        digests = self._engine.world.all_gather_object(hashlib.sha256(given.tobytes()).hexdigest())
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise DataError(
                f"The difficulty on rank {other} differs from that on rank 0, so they would train on other samples. "
                "Each rank makes the array itself: compute it once, and load it from a file, or give a function."
            )
        return given

    def _scores_by_function(self) -> Scores:
        """Return the scores of all samples, of which each rank computes a part. Called on all ranks."""
        world, curriculum = self._engine.world, self.curriculum
        count = len(curriculum)
        first, last = run_of(world.rank, world.world_size, count)
        options = load_options(self._engine, self._spec, self._collate)
        parts = score_samples(curriculum.samples, curriculum.difficulty, first, last, options)
        own = [np.empty(0), *self._reported(parts, last - first)]
        gathered = gather_rows(world, [Piece(world.rank, last - first)], [torch.from_numpy(np.concatenate(own))])
        return check_scores(gathered, count)

    def _reported(self, parts: Iterator[Scores], count: int) -> Iterator[Scores]:
        begun = time.monotonic()
        report_s, done = _QUIET_S, 0
        for part in parts:
            here().beat(Phase.DATA)
            done += len(part)
            if (passed_s := time.monotonic() - begun) > report_s:
                self._engine.notice(
                    f"curriculum: scoring the difficulty of the samples, {100 * done // count} % after {passed_s:.0f} s"
                )
                report_s = passed_s + _REPORT_S
            yield part

    def _scores_by_model(self, step: int) -> Scores:
        """Return the model's scores of all samples. Called on all ranks."""
        assert self._metrics is not None
        engine, name = self._engine, str(self.curriculum.difficulty)
        model, data = engine.trained[0].model, engine.grid.data
        pieces, values = [], []
        samples = self.curriculum.samples
        chunks = read_evaluation(engine, [model], self._spec, step, samples, self._collate)
        with contextlib.closing(chunks):
            for number, (batch, num_rows) in enumerate(chunks):
                metrics = self._metrics(model, batch)
                if num_rows:  # else it is another rank's chunk
                    pieces.append(Piece(number * data.world_size + data.rank, num_rows))
                    values.append(scores_in(metrics, name, num_rows))
        scores = gather_rows(data, pieces, values).to(engine.world.device)
        engine.world.broadcast([scores])  # parts of a model may round differently
        return check_scores(scores, len(self.curriculum))

    def _state(self) -> dict[str, Any]:
        scores = np.empty(0) if self._scores is None else self._scores
        return {"first_epoch": self._first_epoch, "scores": torch.from_numpy(scores)}

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.part("curriculum")
        if int(state["first_epoch"]) < 0:
            return
        try:
            scores = check_scores(state["scores"], len(self.curriculum))
        except DataError as error:
            raise CheckpointError(str(error)) from None
        given = self.curriculum.scores
        if given is not None and not np.array_equal(given, scores):
            self._engine.notice(
                "curriculum: the difficulty is not the one that this run began with, which is still used. To train by "
                "the new one, begin a new run."
            )
        self._scores, self._first_epoch = scores, int(state["first_epoch"])


def scores_in(metrics: dict[str, Any], name: str, num_rows: int) -> torch.Tensor:
    """Return the metric by which a curriculum scores samples; raise TaskError unless it has one value a sample."""
    if name not in metrics:
        known = ", ".join(map(repr, metrics)) or "none"
        raise TaskError(
            f"the curriculum's difficulty is the metric {name!r}, and metrics() returns {known}. Add a value for each "
            f'sample: {{"{name}": F.cross_entropy(model(x), y, reduction="none")}}.'
        )
    value = torch.from_numpy(metrics[name]) if isinstance(metrics[name], np.ndarray) else metrics[name]
    if not isinstance(value, torch.Tensor) or value.numel() != num_rows:
        kind = f"the shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise TaskError(
            f"the curriculum's difficulty is the metric {name!r}, which gave {kind} for {num_rows} samples. One value "
            "a sample is needed, higher for harder ones: a loss with reduction='none', for instance."
        )
    return value.detach().to("cpu", torch.float64).reshape(-1)
