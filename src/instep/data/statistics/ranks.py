"""Which ranks fit together: set by the run, while it calls code of a Task that all ranks execute.

[Note: Fitting together]
`fit` keeps the signature that people know from scikit-learn, so it cannot be given the ranks as an argument; and `data`
issues no collectives. The run therefore says, for the time of a call (`preprocess()`, `train_data()`, `eval_data()`),
which ranks there are, and how they exchange plain values. It is a context variable and no global: another thread does
not see it, and it ends with the call. Whether it is set changes only the time that `fit` takes: the result has the same
bits without it.

Ranks: all, in the same order. A `fit` that one rank alone calls belongs outside of these methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

from instep.core.errors import DataError


class FitRanks(NamedTuple):
    """The ranks that fit together."""

    rank: int = 0
    world_size: int = 1
    all_gather: Callable[[Any], list[Any]] = lambda value: [value]
    """Returns the plain values of all ranks, by rank. Called on all ranks."""

    def part(self, num_samples: int) -> range:
        """Return the samples that this rank reads: contiguous, so that few files are read by two ranks."""
        return range(num_samples * self.rank // self.world_size, num_samples * (self.rank + 1) // self.world_size)


_ALONE = FitRanks()
_ranks: ContextVar[FitRanks] = ContextVar("instep_fit_ranks", default=_ALONE)


@contextlib.contextmanager
def fitting_together(ranks: FitRanks) -> Iterator[None]:
    """Share the work of `fit` over the ranks, all of which call it in the same order."""
    token = _ranks.set(ranks)
    try:
        yield
    finally:
        _ranks.reset(token)


class Accumulator(Protocol):
    """Something that rows are added to, in any grouping and order."""

    def add(self, block: Any) -> None:
        """Add rows."""

    def to_json(self) -> Mapping[str, Any]:
        """Return what was added, as plain values."""

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what another one returned by `to_json`."""


class Reading(NamedTuple):
    """How data is read, once or several times."""

    num_samples: Callable[[], int | None]
    """Returns their number; None: not known."""
    blocks: Callable[[FitRanks], Iterator[Any]]
    """Yields a rank's part."""

    def map(self, fn: Callable[[Any], Any]) -> Reading:
        """Return a reading of `fn(block)` of each block."""
        return Reading(self.num_samples, lambda ranks: map(fn, self.blocks(ranks)))


_A = TypeVar("_A", bound=Accumulator)


def accumulate(new: Callable[[], _A], data: Reading) -> _A:
    """Return an accumulator with all rows, of which this rank reads its part. Called on all ranks that fit together.

    What one rank finds wrong is raised on all of them: none waits for another.
    """
    ranks, own, problem, size = _ranks.get(), new(), "", None
    try:
        size = data.num_samples()
        for block in data.blocks(ranks):
            own.add(block)
    except DataError as error:
        if ranks.world_size == 1:
            raise
        problem = str(error)
    if ranks.world_size == 1:
        return own
    gathered = ranks.all_gather({"problem": problem, "size": size, "state": {} if problem else own.to_json()})
    if problem := next(filter(None, (each["problem"] for each in gathered)), ""):
        raise DataError(problem)
    others = [rank for rank, each in enumerate(gathered) if each["size"] != gathered[0]["size"]]
    if others:
        raise DataError(
            f"fit() was given {gathered[others[0]]['size']} samples on rank {others[0]} and {gathered[0]['size']} on "
            "rank 0. Within preprocess() and train_data() the ranks share one fit: give all of them all the data."
        )
    whole = new()
    for each in gathered:
        whole.merge(each["state"])
    return whole
