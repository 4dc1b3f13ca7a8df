"""Whether a rank holds the others up. Pure: from times to sentences, no torch.

A rank is slow in a check when its own part of a step, without waiting for others, takes more than a third (and more
than a millisecond) longer than the median of the others' does (of two the larger: one that is fast makes nobody slow).
A rank that has more rows to work through may take
longer, so it must be slow by the row, too. It is named when it was slow in three checks in a row, and again only after
a check in which it was not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_RATIO = 4 / 3
_LEAST_S = 1e-3
_IN_A_ROW = 3


@dataclass(frozen=True)
class Share:
    """What one rank's own part of a step takes, on average."""

    data_s: float
    compute_s: float
    num_rows: float = 1.0

    @property
    def total_s(self) -> float:
        """Both phases."""
        return self.data_s + self.compute_s


class Pace:
    """Counts what this rank's own part of the steps takes, from one look to the next."""

    def __init__(self) -> None:
        self.data_s = self.compute_s = 0.0
        self.num_rows = self.num_steps = 0

    def take(self) -> Share:
        """Give the means, and begin anew."""
        steps = max(1, self.num_steps)
        share = Share(self.data_s / steps, self.compute_s / steps, self.num_rows / steps)
        self.__init__()  # type: ignore[misc]
        return share


class Slowness:
    """Remembers for how long each rank has been slow."""

    def __init__(self, world_size: int) -> None:
        self._in_a_row = [0] * world_size

    def judge(self, shares: Sequence[Share]) -> list[str]:
        """Look at one check's times, by rank; give a sentence for each rank that is to be named now."""
        found = []
        for rank, share in enumerate(shares):
            others = [other for number, other in enumerate(shares) if number != rank]
            if not others or not is_slow(share, others):
                self._in_a_row[rank] = 0
                continue
            self._in_a_row[rank] += 1
            if self._in_a_row[rank] == _IN_A_ROW:
                found.append(_sentence(rank, share, others))
        return found


def is_slow(share: Share, others: Sequence[Share]) -> bool:
    """Tell whether a rank is slower than the median of the others, by the step and by the row."""
    median = statistics.median_high(other.total_s for other in others)
    if share.total_s - median <= _LEAST_S or share.total_s <= _RATIO * median:
        return False
    by_row = [other.total_s / other.num_rows for other in others if other.num_rows]
    return not by_row or not share.num_rows or share.total_s / share.num_rows > _RATIO * statistics.median_high(by_row)


def _sentence(rank: int, share: Share, others: Sequence[Share]) -> str:
    data_s = statistics.median_high(other.data_s for other in others)
    compute_s = statistics.median_high(other.compute_s for other in others)
    if share.data_s - data_s > share.compute_s - compute_s:
        phase, own, usual = "data", share.data_s, data_s
    else:
        phase, own, usual = "forward and backward", share.compute_s, compute_s
    wait, take = ("ranks wait", "others take") if len(others) > 1 else ("rank waits", "other takes")
    return f"rank {rank} takes {_ms(own)} ms a step for {phase} where the {take} {_ms(usual)}; the other {wait} for it"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 0.01 else f"{1000 * seconds:.1f}"
