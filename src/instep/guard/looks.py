"""Whether a rank that is quiet is stuck, or at work: two looks a moment apart. Pure.

[Note: Quiet and stuck]
A rank may be quiet for long and be well: preprocessing, an evaluation on one rank alone, a large checkpoint. So silence
is only a reason to look. A rank is stuck if, between two looks, it and its children have neither computed nor read nor
written anything to speak of and its main thread stands where it stood. One that ended or was stopped does not move. One
that a debugger holds is left to whoever debugs it. Only when all ranks are stuck is it a hang.

In instep's own collectives a rank may wait busily, and still be stuck: around those pulses are so dense that a silence
says enough. Not so in a script's: one that evaluates in step with others, and adds up over and over at the same line,
looks the same at every look, and makes no step that could be counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from instep.guard.collectives import explicit_depth, is_worlds
from instep.guard.pulse import Phase
from instep.guard.sighting import Frame, Sighting

_NOTICEABLE_CPU = 0.1
"""Of one core."""
_NOTICEABLE_IO_BYTES_S = 1_000_000


def all_stuck(earlier: Sequence[Sighting], later: Sequence[Sighting], seconds: float) -> bool:
    """Tell whether it is a hang; the looks were `seconds` apart ([Note: Quiet and stuck])."""
    before = {sighting.rank: sighting for sighting in earlier}
    return before.keys() == {sighting.rank for sighting in later} and all(
        is_stuck(before[sighting.rank], sighting, seconds) for sighting in later
    )


def is_stuck(earlier: Sighting, later: Sighting, seconds: float) -> bool:
    """Tell whether one rank did not move between two looks."""
    if earlier.process is None or later.process is None:
        return earlier.process is later.process  # both looks found it ended
    if later.process.state == "t":
        return False
    if later.process.is_stopped:
        return earlier.process.is_stopped
    if _place_of(later.process.stack) != _place_of(earlier.process.stack):
        return False
    if later.phase == Phase.REDUCE or is_worlds(later.process.stack):
        return True
    return (
        later.process.state != "R"
        and later.cpu_s - earlier.cpu_s < _NOTICEABLE_CPU * seconds
        and later.io_bytes - earlier.io_bytes < _NOTICEABLE_IO_BYTES_S * seconds
    )


def _place_of(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Give the part of a stack that moves only if the rank does: in a collective, the calls down to it."""
    depth = explicit_depth(stack)
    return stack if depth is None else stack[depth:]
