"""Planned faults: what goes wrong and when, chosen by a seed. Pure."""

import random
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """A kind of fault."""

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
    """When a fault happens."""

    ANY = "between steps"
    SAVE = "during a save"
    RECOVERY = "during recovery"


_TWICE = (Kind.SLOW_RANK, Kind.KILL_SUPERVISOR, Kind.KILL_JOB, Kind.PREEMPT)
_WEIGHTS = dict.fromkeys(Kind, 1) | dict.fromkeys(_TWICE, 2) | {Kind.KILL_RANK: 5}
_ANYTIME = (Kind.SLOW_RANK, Kind.DISK_FULL, Kind.IO_ERROR)


@dataclass(frozen=True)
class Fault:
    """One planned fault."""

    kind: Kind
    moment: Moment
    delay_s: float
    """How long to wait after the moment has come."""
    pick: float
    """From 0 to 1: selects the rank, the file or the bit."""


def plan_faults(seed: int, count: int) -> list[Fault]:
    """Return the faults of a campaign. The first ones contain every kind once."""
    rng = random.Random(seed)
    kinds = rng.sample(list(Kind), len(Kind))
    kinds += rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=max(0, count - len(kinds)))
    return [_fault(rng, kind) for kind in kinds[:count]]


def _fault(rng: random.Random, kind: Kind) -> Fault:
    moments = [Moment.ANY] if kind in _ANYTIME else [Moment.ANY, Moment.ANY, Moment.SAVE, Moment.RECOVERY]
    moment = rng.choice(moments)
    delay_s = rng.uniform(0.0, {Moment.ANY: 0.8, Moment.SAVE: 0.003, Moment.RECOVERY: 0.5}[moment])
    return Fault(kind, moment, round(delay_s, 4), rng.random())
