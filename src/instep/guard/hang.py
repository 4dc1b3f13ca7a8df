"""Whether quiet ranks hang: how long they may be quiet, and whether they moved between two observations. Pure.

[Note: Quiet and stuck]
A rank may be quiet for long and be well: preprocessing, an evaluation on one rank alone, a large checkpoint. So a quiet
job is only a reason to observe it. A rank is stuck if, between two observations, it and its children have neither
computed nor read nor written a noticeable amount, and its main thread is at the same place. A rank that ended or was
stopped does not move. A rank under a debugger is never called stuck. Only if all ranks are stuck is it a hang.

In instep's own collectives a rank may spin and still be stuck: pulses are so dense around those that no pulse means
no progress. That is not so in a script's collectives: a script that evaluates on all ranks and calls all_reduce at the
same line over and over looks the same in every observation, and makes no step that could be counted.

A rank that computes without end is not stuck: it moves. But if all other ranks wait in a collective, and it has not
written its pulse for as long as a hang would take, it is named; after several times as long it is a hang, too.
"""

import math
from collections.abc import Sequence

from instep.guard.collectives import collective_of, explicit_depth, is_worlds
from instep.guard.observation import Frame, Observation
from instep.guard.pulse import Phase

_NOTICEABLE_CPU = 0.1
"""Of one core."""
_NOTICEABLE_IO_BYTES_S = 1_000_000
_LEAST_TIMEOUT_S = 300.0
_FIRST_STEP_TIMEOUT_S = 1800.0
_TIMES_LONGEST = 20.0
_TIMES_BUSY, _TIMES_BUSY_AUTO = 6.0, 24.0
"""How many times as long as another hang a rank may compute while all others wait for it."""


def hang_timeout_s(hang_after_s: float | None, made_a_step: bool, longest_s: float) -> float:
    """Return after how many quiet seconds to look for a hang; `hang_after_s` None: derive it from the job so far.

    Before the first step a dataset may be prepared, a model compiled. After it, `longest_s`, the longest quiet time so
    far, is usual for this job: an evaluation on one rank, a checkpoint to a slow disk.
    """
    if hang_after_s is not None:
        return hang_after_s
    usual = max(_LEAST_TIMEOUT_S, _TIMES_LONGEST * longest_s)
    return usual if made_a_step else max(usual, _FIRST_STEP_TIMEOUT_S)


def busy_timeout_s(hang_after_s: float | None, timeout_s: float) -> float:
    """Return how long a rank may compute while all others wait for it; `timeout_s` is that of another hang."""
    return timeout_s * (_TIMES_BUSY_AUTO if hang_after_s is None else _TIMES_BUSY)


def recheck_after_s(timeout_s: float) -> float:
    """Return how long to leave quiet ranks alone that turned out to be at work."""
    return min(30.0, max(1.0, timeout_s / 4)) if math.isfinite(timeout_s) else 30.0


def all_stuck(earlier: Sequence[Observation], later: Sequence[Observation], seconds: float) -> bool:
    """Return whether it is a hang; the observations were `seconds` apart ([Note: Quiet and stuck])."""
    before = {observation.rank: observation for observation in earlier}
    return before.keys() == {observation.rank for observation in later} and all(
        is_stuck(before[observation.rank], observation, seconds) for observation in later
    )


def busy_ranks(earlier: Sequence[Observation], later: Sequence[Observation], seconds: float) -> list[int]:
    """Return the ranks that were at work between two observations while all others waited for them; else none."""
    before = {observation.rank: observation for observation in earlier}
    if before.keys() != {observation.rank for observation in later}:
        return []
    busy = [after for after in later if not is_stuck(before[after.rank], after, seconds)]
    others = [after for after in later if after not in busy]
    is_waited_for = bool(others) and all(
        after.process is not None and not after.process.is_stopped and _is_waiting(after) for after in others
    )
    is_computing = all(after.process is not None and after.process.state != "t" for after in busy)
    return [after.rank for after in busy] if is_waited_for and is_computing else []


def _is_waiting(observation: Observation) -> bool:
    assert observation.process is not None
    return observation.phase == Phase.REDUCE or bool(collective_of(observation.process.stack))


def is_stuck(earlier: Observation, later: Observation, seconds: float) -> bool:
    """Return whether one rank did not move between two observations."""
    if earlier.process is None or later.process is None:
        return earlier.process is later.process  # it had ended both times
    if later.process.state == "t":
        return False
    if later.process.is_stopped:
        return earlier.process.is_stopped
    if _position(later.process.stack) != _position(earlier.process.stack):
        return False
    if later.phase == Phase.REDUCE or is_worlds(later.process.stack):
        return True
    return (
        later.process.state != "R"
        and later.cpu_s - earlier.cpu_s < _NOTICEABLE_CPU * seconds
        and later.io_bytes - earlier.io_bytes < _NOTICEABLE_IO_BYTES_S * seconds
    )


def _position(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the part of a stack that changes only if the rank moves: in a collective, the calls down to it."""
    depth = explicit_depth(stack)
    return stack if depth is None else stack[depth:]
