"""Which rank makes the others wait. Pure: from times to sentences, no torch.

A rank is slow in a check when its own part of a step, without waiting for others, takes more than a third (and more
than a millisecond) longer than the median of the others (with two others the larger: one fast rank makes nobody slow).
A rank with more rows may take longer, so it must be slow per row, too. A rank is reported as a straggler when it was
slow in three checks in a row, and again only after a check in which it was not.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_RATIO = 4 / 3
_LEAST_S = 1e-3
_IN_A_ROW = 3


@dataclass(frozen=True)
class StepTime:
    """What one rank's own part of a step takes, on average."""

    data_s: float
    compute_s: float
    num_rows: float = 1.0

    @property
    def total_s(self) -> float:
        """Both phases."""
        return self.data_s + self.compute_s


class StepTimer:
    """Adds up what this rank's own part of the steps takes, from one check to the next."""

    def __init__(self) -> None:
        self.data_s = self.compute_s = 0.0
        self.num_rows = self.num_steps = 0

    def take(self) -> StepTime:
        """Return the means, and start again from zero."""
        steps = max(1, self.num_steps)
        time = StepTime(self.data_s / steps, self.compute_s / steps, self.num_rows / steps)
        self.__init__()  # type: ignore[misc]
        return time


class StragglerDetector:
    """Counts in how many checks in a row each rank was slow."""

    def __init__(self, world_size: int) -> None:
        self._in_a_row = [0] * world_size

    def check(self, times: Sequence[StepTime]) -> list[str]:
        """Take one check's times, by rank; return a sentence for each rank that is to be reported now."""
        sentences = []
        for rank, time in enumerate(times):
            others = [other for number, other in enumerate(times) if number != rank]
            if not others or not is_slow(time, others):
                self._in_a_row[rank] = 0
                continue
            self._in_a_row[rank] += 1
            if self._in_a_row[rank] == _IN_A_ROW:
                sentences.append(_sentence(rank, time, others))
        return sentences


def is_slow(time: StepTime, others: Sequence[StepTime]) -> bool:
    """Return whether a rank is slower than the median of the others, per step and per row."""
    median = statistics.median_high(other.total_s for other in others)
    if time.total_s - median <= _LEAST_S or time.total_s <= _RATIO * median:
        return False
    by_row = [other.total_s / other.num_rows for other in others if other.num_rows]
    return not by_row or not time.num_rows or time.total_s / time.num_rows > _RATIO * statistics.median_high(by_row)


def _sentence(rank: int, time: StepTime, others: Sequence[StepTime]) -> str:
    data_s = statistics.median_high(other.data_s for other in others)
    compute_s = statistics.median_high(other.compute_s for other in others)
    if time.data_s - data_s > time.compute_s - compute_s:
        phase, own, usual = "data", time.data_s, data_s
    else:
        phase, own, usual = "forward and backward", time.compute_s, compute_s
    wait, take = ("ranks wait", "others take") if len(others) > 1 else ("rank waits", "other takes")
    return f"rank {rank} takes {_ms(own)} ms a step for {phase} where the {take} {_ms(usual)}; the other {wait} for it"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 0.01 else f"{1000 * seconds:.1f}"
