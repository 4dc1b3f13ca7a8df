"""Curricula: datasets whose easiest samples are trained on first.

Ranks: all, alike; no communication. Inside a run, `train` computes the scores, each rank its part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from instep.core.errors import DataError, SpecError, TaskError
from instep.data.batch_plan import BatchSpec
from instep.data.columns import as_columns
from instep.data.loader import LoadOptions, num_samples
from instep.data.order import Indices
from instep.data.ordered import OrderedDataset
from instep.data.orders.curriculum import CurriculumOrder, Scores, rank_samples
from instep.data.orders.pacing import Pacing
from instep.data.readers import Request, find_reader
from instep.data.stream import is_stream

Difficulty = Callable[[Any], Any]
"""Returns how hard a sample is: a number, higher is harder."""
ScoresOf = Callable[[int], tuple[int, Scores]]
"""Returns from which epoch on the scores hold that hold in an epoch, and the scores."""

_SCORED_AT_ONCE = 256
_NO_DIFFICULTY = (
    "curriculum(dataset) without a difficulty uses the Task's: define difficulty(sample) there, or give a function of "
    "a sample, an array of scores, or the name of a metric."
)
_NO_METRICS = (
    "difficulty={name!r} is the name of a metric, which a Task computes. In a loop of one's own, call "
    "run.score_by(metrics) before run.steps(); elsewhere give a function of a sample, or an array of scores."
)


def curriculum(
    dataset: Any,
    difficulty: Any = None,
    *,
    pacing: str | Callable[[float], float] = "linear",
    start: float | None = None,
    end: float | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    buckets: int | None = None,
    rescore: int | None = None,
    reverse: bool = False,
) -> Curriculum:
    """Return the samples of a dataset in an order that begins with the easiest.

    `difficulty` is a function of a sample, a score for each sample (higher is harder), or the name of one of the Task's
    metrics: then the model scores the samples, every `rescore` epochs. Without it, the Task's `difficulty(sample)`.
    In the first step the easiest `start` of the samples are used (0.2), and `end` of them (all) after so many `steps`
    or `epochs`; `pacing` says how it grows: "linear", "root", "exponential", "steps" (in as many `buckets` of one
    size, 5), or a function from the progress in 0..1 to a fraction. `reverse`: the hardest first.
    """
    paced = Pacing(pacing=pacing, start=start, end=end, steps=steps, epochs=epochs, buckets=buckets)
    return Curriculum(dataset, difficulty, paced, rescore, reverse)


class Curriculum(OrderedDataset):
    """The samples of a dataset, the easiest first."""

    def __init__(
        self, samples: Any, difficulty: Any, pacing: Pacing, rescore: int | None = None, reverse: bool = False
    ) -> None:
        check_indexed(samples)
        if rescore is not None and rescore < 1:
            raise SpecError(f"rescore={rescore} is not possible: it is a number of epochs, at least 1.")
        if rescore is not None and not isinstance(difficulty, str):
            raise SpecError(
                f"rescore={rescore} is for scores of the model, which change: give the name of a metric as difficulty. "
                "Other scores are computed once."
            )
        super().__init__(samples, self._order_by_itself, comes_once=False)
        self.difficulty, self.pacing, self.reverse = difficulty, pacing, reverse
        self.rescore = (rescore or 1) if isinstance(difficulty, str) else 0
        """After how many epochs the model scores the samples, each time; 0: never."""
        is_given = difficulty is not None and not isinstance(difficulty, str) and not callable(difficulty)
        self.scores = check_scores(difficulty, len(self)) if is_given else None
        """If they were given."""

    def __len__(self) -> int:
        return num_samples(self.samples)

    def with_difficulty(self, difficulty: Difficulty) -> Curriculum:
        """Return the same curriculum by this function of a sample."""
        return Curriculum(self.samples, difficulty, self.pacing, None, self.reverse)

    def with_scores(self, scores_of: ScoresOf) -> OrderedDataset:
        """Return the samples in the order of these scores."""
        return OrderedDataset(self.samples, partial(self.order, scores_of=scores_of), comes_once=False)

    def order(self, batches: BatchSpec, scores_of: ScoresOf) -> CurriculumOrder:
        """Return the order by these scores."""
        known: dict[int, Indices] = {}

        def ranking_of(epoch: int) -> Indices:
            first_epoch, scores = scores_of(epoch)
            if first_epoch not in known:
                known.clear()  # it takes as much memory as the scores
                known[first_epoch] = rank_samples(batches.seed, -scores if self.reverse else scores)
            return known[first_epoch]

        return CurriculumOrder(batches, len(self), self.pacing, ranking_of, self.rescore)

    def check_difficulty(self) -> None:
        """Raise TaskError if there is nothing to score samples by."""
        if self.difficulty is None:
            raise TaskError(_NO_DIFFICULTY)
        if isinstance(self.difficulty, str):
            raise TaskError(_NO_METRICS.format(name=self.difficulty))

    def _order_by_itself(self, batches: BatchSpec) -> CurriculumOrder:
        """Return the order outside of a run: of given scores, or of a function's, computed here."""
        self.check_difficulty()
        scores = self.scores
        if scores is None:
            options = LoadOptions(workers=0, seed=batches.seed)
            parts = score_samples(self.samples, self.difficulty, 0, len(self), options)
            scores = check_scores(np.concatenate(list(parts)), len(self))
        return self.order(batches, lambda _epoch: (0, scores))


def check_indexed(samples: Any) -> None:
    """Raise SpecError for samples that have no index, or of which nobody knows what they are."""
    if is_stream(samples):
        raise SpecError(
            f"A curriculum needs samples that can be read by their index, and {type(samples).__name__} is a stream, "
            "which only says what comes next. Store it as files, or order it yourself."
        )
    if isinstance(samples, list) and as_columns(samples, samples_wanted=False) is not None:
        raise SpecError("A list of tensors may be columns or samples. Give columns as a tuple or a dict of tensors.")


def check_scores(values: Any, count: int) -> Scores:
    """Return the scores of so many samples; raise DataError if they are others, or none."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        scores = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"The difficulty is a {type(values).__name__}, not numbers: {error}.") from None
    if scores.shape != (count,):
        raise DataError(
            f"The difficulty has the shape {list(scores.shape)}, and the dataset has {count} samples. Give one score "
            "for each sample."
        )
    if (bad := np.flatnonzero(np.isnan(scores))).size:
        raise DataError(
            f"The difficulty of {bad.size} samples is NaN, the first is sample {bad[0]}: NaN is neither easy nor hard. "
            "Give a large number, or inf, to what is to come last."
        )
    return scores


def score_samples(
    samples: Any, difficulty: Difficulty, first: int, last: int, options: LoadOptions
) -> Iterator[Scores]:
    """Yield the scores of the samples first..last-1, a few hundred at a time; read ahead as a training would."""
    reader = find_reader(samples, partial(_scores_of_rows, difficulty), options.seed)
    starts = range(first, last, _SCORED_AT_ONCE)
    source = options.open_source(reader, samples, max_workers=len(starts))
    requests = (Request(0, torch.arange(start, min(start + _SCORED_AT_ONCE, last))) for start in starts)
    try:
        for scores in source.read(requests):
            yield scores.numpy()
    finally:
        source.close()


def _scores_of_rows(difficulty: Difficulty, samples: list[Any]) -> torch.Tensor:
    return torch.tensor([_number(difficulty(sample)) for sample in samples], dtype=torch.float64)


def _number(score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError):
        raise TaskError(
            f"difficulty(sample) returned a {type(score).__name__}; a number is needed, higher for harder samples."
        ) from None
