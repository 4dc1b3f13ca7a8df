"""What can go wrong on purpose, and when: a script that a seed decides. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is done to a training."""

    KILL_RANK = "SIGKILL of a rank"
    STOP_RANK = "SIGSTOP of a rank"
    SLOW_RANK = "a rank stands still for a moment"
    KILL_SUPERVISOR = "SIGKILL of the supervisor"
    KILL_JOB = "SIGKILL of every process"
    PREEMPT = "SIGTERM"
    FLIP = "a bit flipped in the newest checkpoint"
    TRUNCATE = "the newest checkpoint cut off"
    REMOVE = "a file of the newest checkpoint removed"
    DISK_FULL = "disk full"
    IO_ERROR = "input/output error"


class Moment(Enum):
    """When it is done."""

    ANY = "between steps"
    SAVE = "during a save"
    RECOVERY = "during recovery"


_WEIGHTS = {
    Kind.KILL_RANK: 5,
    Kind.STOP_RANK: 1,  # costs the whole time until a hang is declared
    Kind.SLOW_RANK: 2,
    Kind.KILL_SUPERVISOR: 2,
    Kind.KILL_JOB: 2,
    Kind.PREEMPT: 2,
    Kind.FLIP: 1,
    Kind.TRUNCATE: 1,
    Kind.REMOVE: 1,
    Kind.DISK_FULL: 1,
    Kind.IO_ERROR: 1,
}
_ANYTIME = (Kind.SLOW_RANK, Kind.DISK_FULL, Kind.IO_ERROR)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: Kind
    moment: Moment
    delay_s: float
    """How long to wait once the moment has come."""
    pick: float
    """From 0 to 1: which rank, which file, which bit."""


def plan_faults(seed: int, count: int) -> list[Fault]:
    """Write the script of a campaign. Of so many faults as there are kinds, every kind is there once."""
    rng = random.Random(seed)
    kinds: list[Kind] = []
    while len(kinds) < count:
        kinds += (
            rng.sample(list(Kind), len(Kind)) if not kinds else rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        )
    return [_fault(rng, kind) for kind in kinds[:count]]


def _fault(rng: random.Random, kind: Kind) -> Fault:
    moments = [Moment.ANY] if kind in _ANYTIME else [Moment.ANY, Moment.ANY, Moment.SAVE, Moment.RECOVERY]
    moment = rng.choice(moments)
    delay_s = rng.uniform(0.0, {Moment.ANY: 0.8, Moment.SAVE: 0.003, Moment.RECOVERY: 0.5}[moment])
    return Fault(kind, moment, round(delay_s, 4), rng.random())
