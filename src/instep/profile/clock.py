"""How far the clocks of ranks are apart, measured with collectives. Pure.

Each rank notes when it enters an all-gather, and when it leaves it. No rank leaves before every rank has entered, so a
pair of times bounds the offset of two clocks from either side. The middle of the tightest bounds is the offset.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClockOffset:
    """How far a rank's clock is ahead of rank 0's."""

    ahead_ns: int = 0
    doubt_ns: int = 0
    """The true offset is at most this far away."""


def clock_offsets(entered: Sequence[Sequence[int]], left: Sequence[Sequence[int]]) -> list[ClockOffset]:
    """Return each rank's offset, from when it entered and left each of several all-gathers, by rank and round."""
    offsets = []
    for own_entered, own_left in zip(entered, left, strict=True):
        lowest = max(mine - theirs for mine, theirs in zip(own_entered, left[0], strict=True))
        highest = min(mine - theirs for mine, theirs in zip(own_left, entered[0], strict=True))
        offsets.append(ClockOffset((lowest + highest) // 2, max(0, highest - lowest + 1) // 2))
    return [ClockOffset(), *offsets[1:]]
