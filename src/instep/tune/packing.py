"""How many trials run at the same time, and what that brings. Pure.

[Note: Packing]
With `--parallel auto` the first trial runs alone until its memory is known. Then as many run as there are cores for
their processes, and memory for the largest trial so far. The throughput of the trials that run at once is compared with
that of the one that ran alone, in samples a second: trials that cost more than that one make it look worse.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from typing import Any

from instep.core.errors import SpecError

AUTO = "auto"
_SHARE = 0.9
"""Of the memory that is free: other programs, and trials with a larger model, need some."""
_FEWEST_RATES, _MOST_RATES = 3, 64
"""Of trials alone, and of trials at once, to compare: one rate is of about a second."""


@dataclass(frozen=True)
class Room:
    """What this machine has for trials, before one of them is running."""

    num_trials: int
    """As many as there are cores for."""
    free_bytes: int
    """Of the host's memory, or of one accelerator's."""


@dataclass
class TrialLoad:
    """What one training takes, by its events."""

    processes: int
    peak_bytes: int = 0
    rate: float = 0.0
    """Samples a second, of all its ranks, lately."""

    def take(self, event: dict[str, Any]) -> None:
        """Take an event of rank 0 into account."""
        if event["event"] == "memory":
            device = event.get("device_bytes")
            self.peak_bytes = max(self.peak_bytes, int(device or event["host_bytes"] * self.processes))
        elif event["event"] == "phases" and event["num_steps"] and "startup" not in event["phases"]:
            self.rate = event["num_samples"] * self.processes / max(event["seconds"], 1e-9)


@dataclass
class Packing:
    """Decides how many trials run at once. See [Note: Packing]."""

    fixed: int | None
    """The number that the user gave; None: as many as fit."""
    room: Room
    _peak_bytes: int = 0
    _alone: list[float] = field(default_factory=list)
    _together: list[float] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """How many may run at once, as far as is known now."""
        if self.fixed is not None:
            return self.fixed
        if not self._peak_bytes:
            return 1
        return max(1, min(self.room.num_trials, int(_SHARE * self.room.free_bytes) // self._peak_bytes))

    def measure(self, loads: list[TrialLoad]) -> None:
        """Note what the trials take that are running now."""
        self._peak_bytes = max([self._peak_bytes, *(load.peak_bytes for load in loads)])
        if not loads or not all(load.rate for load in loads):
            return
        rates, total = self._alone if len(loads) == 1 else self._together, sum(load.rate for load in loads)
        if rates[-1:] != [total]:  # else no trial has told anything since
            rates.append(total)
            del rates[:-_MOST_RATES]

    @property
    def speedup(self) -> float | None:
        """How many times as many samples a second the trials at once compute as one alone; None: it is not known."""
        if min(len(self._alone), len(self._together)) < _FEWEST_RATES:
            return None
        return statistics.median(self._together) / statistics.median(self._alone)


def read_parallel(text: int | str) -> int | None:
    """Return the number of trials at once that a text names; None: as many as fit."""
    if text == AUTO:
        return None
    if not re.fullmatch(r"-?\d+", str(text)):
        raise SpecError(f"parallel={text!r} is neither a number of trials nor {AUTO}.")
    return int(text)
