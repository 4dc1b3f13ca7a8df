"""How a pipeline works through a batch: into how many microbatches it is cut, and how long its stages stand idle.

Pure arithmetic.

[Note: Bubble]
A stage waits for the first microbatch to reach it, and after its last one for the others to end. With p stages of equal
cost and m microbatches, it is busy for m of m + p - 1 turns, whether all forward passes come first (gpipe) or forward
and backward passes alternate (1f1b, which needs less memory, not less time). With v stages a rank (interleaved) a turn
is a v-th as long, so that the wait is, too: v·m of v·m + p - 1 turns.
"""

from __future__ import annotations

import itertools
from typing import Literal, get_args

from instep.core.errors import SpecError

Schedule = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
_INTERLEAVED_STAGES = 2
_DEFAULT_A_STAGE = 4
"""Microbatches for each rank of a pipeline: its stages stand idle for less than a fifth of the time."""


def stages_a_rank(schedule: Schedule) -> int:
    """How many stages of the model each rank of a pipeline has."""
    return _INTERLEAVED_STAGES if schedule == "interleaved" else 1


def check_microbatches(schedule: Schedule, microbatches: int | None, num_ranks: int) -> None:
    """Refuse a number of microbatches that a schedule cannot go through."""
    if microbatches is None or scheduled(schedule, microbatches, num_ranks) == microbatches:
        return
    if schedule == "1f1b":
        raise SpecError(
            f"microbatches={microbatches} does not fill a pipeline of {num_ranks} stages: with schedule=1f1b each "
            f"stage has one to work on. Use microbatches >= {num_ranks}, or schedule=gpipe."
        )
    raise SpecError(
        f"microbatches={microbatches} does not come out: schedule=interleaved works through them in rounds of about "
        f"{num_ranks}, one for each rank of the pipeline. Use a multiple of {num_ranks}."
    )


def useful(asked: int | None, rows: int, num_ranks: int) -> int:
    """Into how many microbatches `rows` rows are cut: as many as asked for, but none is empty.

    Unless asked, enough to fill the pipeline, and not so many that they are single rows.
    """
    if asked is None:
        asked = max(num_ranks, min(_DEFAULT_A_STAGE * num_ranks, rows // 2))
    return min(asked, rows)


def scheduled(schedule: Schedule, count: int, num_ranks: int) -> int:
    """With how many microbatches a schedule goes through `count` of them: the rest are empty."""
    if schedule == "gpipe":
        return count
    if schedule == "1f1b":
        return max(count, num_ranks)
    return next(total for total in itertools.count(count) if total % max(1, total // num_ranks) == 0)


def cut(rows: int, count: int) -> list[int]:
    """Give the bounds of `count` microbatches, as `--accumulate` cuts a batch: they differ by at most one row."""
    return [rows * number // count for number in range(count + 1)]


def bubble(schedule: Schedule, num_ranks: int, microbatches: int) -> float:
    """Predict the share of the time in which the ranks of a pipeline stand idle ([Note: Bubble])."""
    turns = stages_a_rank(schedule) * microbatches
    return (num_ranks - 1) / (turns + num_ranks - 1)
