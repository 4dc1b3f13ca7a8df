"""The micro-batches of a pipeline: how many, and how long its stages are idle.

Pure arithmetic.

[Note: Bubble]
A stage waits until the first micro-batch reaches it, and after its last one until the other stages end. With p stages
of equal cost and m micro-batches, it is busy for m of m + p - 1 turns. This holds if all forward passes come first
(gpipe), and also if forward and backward passes alternate (1f1b, which needs less memory, not less time). With v stages
per rank (interleaved), a turn takes 1/v of the time, and so does the wait: v·m of v·m + p - 1 turns.
"""

import itertools
from typing import Literal

from instep.core.errors import SpecError

Schedule = Literal["gpipe", "1f1b", "interleaved"]
_INTERLEAVED_STAGES = 2
_DEFAULT_A_STAGE = 4
"""Micro-batches for each rank of a pipeline: stages are idle for less than a fifth of the time."""


def stages_a_rank(schedule: Schedule) -> int:
    """Return the number of stages of each rank of a pipeline."""
    return _INTERLEAVED_STAGES if schedule == "interleaved" else 1


def check_microbatches(schedule: Schedule, microbatches: int | None, num_ranks: int) -> None:
    """Raise SpecError for a number of micro-batches that a schedule cannot run."""
    if microbatches is None or scheduled(schedule, microbatches, num_ranks) == microbatches:
        return
    if schedule == "1f1b":
        raise SpecError(
            f"microbatches={microbatches} does not fill a pipeline of {num_ranks} stages: with schedule=1f1b each "
            f"stage has one to work on. Use microbatches >= {num_ranks}, or schedule=gpipe."
        )
    raise SpecError(
        f"microbatches={microbatches} cannot be scheduled: schedule=interleaved runs them in groups of about "
        f"{num_ranks}, one for each rank of the pipeline. Use a multiple of {num_ranks}."
    )


def useful(asked: int | None, rows: int, num_ranks: int) -> int:
    """Return the number of micro-batches of `rows` rows: as many as asked for, but none is empty.

    Unless asked for, enough to fill the pipeline, and not so many that each has a single row.
    """
    if asked is None:
        asked = max(num_ranks, min(_DEFAULT_A_STAGE * num_ranks, rows // 2))
    return min(asked, rows)


def scheduled(schedule: Schedule, count: int, num_ranks: int) -> int:
    """Return the number of micro-batches that a schedule runs for `count` of them; the others are empty."""
    if schedule == "gpipe":
        return count
    if schedule == "1f1b":
        return max(count, num_ranks)
    return next(total for total in itertools.count(count) if total % max(1, total // num_ranks) == 0)


def cut(rows: int, count: int) -> list[int]:
    """Return the bounds of `count` micro-batches, whose sizes differ by at most one row, as with `--accumulate`."""
    return [rows * number // count for number in range(count + 1)]


def bubble(schedule: Schedule, num_ranks: int, microbatches: int) -> float:
    """Return the predicted share of the time for which the ranks of a pipeline are idle ([Note: Bubble])."""
    turns = stages_a_rank(schedule) * microbatches
    return (num_ranks - 1) / (turns + num_ranks - 1)
