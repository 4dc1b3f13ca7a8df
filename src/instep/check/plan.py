"""How long a script is watched. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from instep.core.durations import seconds_of
from instep.core.errors import SpecError

_MIN_STEPS, _MAX_STEPS = 30, 300
_EPOCHS = 3
"""Epochs that have to begin: the third one proves that two were seen whole."""
_MIN_TIME_S = 20.0
"""A script that ends by itself within this time shows what it does at its end, too."""
_TIMES_START = 5.0


@dataclass(frozen=True)
class Progress:
    """How far the ranks of a script have come, all together."""

    step: int = 0
    """Optimizer steps of the rank that has made most."""
    epochs: int = 0
    """How often the loader that feeds the training has begun."""
    evaluated: bool = False
    seconds: float = 0.0
    """Since the first optimizer step."""


@dataclass(frozen=True)
class WatchPlan:
    """When enough was seen."""

    num_steps: int | None = None
    """Exactly so many optimizer steps; None: until two epochs and an evaluation were seen, and some time has passed."""
    time_s: float = 120.0
    """At most so long, from the first optimizer step; a script may take some times as long to get there."""

    @classmethod
    def parse(cls, steps: int | None, time: str) -> WatchPlan:
        """Return the plan that the command line asks for; raise SpecError if there is none such."""
        if steps is not None and steps < 1:
            raise SpecError(f"steps={steps} would watch nothing. Use at least 1; 30 and more show most mistakes.")
        time_s = seconds_of(time)
        if not time_s:
            raise SpecError(f"time={time!r} is not a time. Write for instance 30s, 2m or 1h.")
        return cls(steps, time_s)

    def time_limit_s(self, has_stepped: bool) -> float:
        """Return how long to watch: since the first step, or since the script's first line if it has made none."""
        return self.time_s if has_stepped else _TIMES_START * self.time_s

    def is_enough(self, progress: Progress) -> bool:
        """Return whether the script may be ended after the step that has just been made."""
        if self.num_steps is not None:
            return progress.step >= self.num_steps
        if progress.step >= _MAX_STEPS:
            return True
        has_passed = progress.step >= _MIN_STEPS and progress.seconds >= _MIN_TIME_S
        return has_passed and progress.epochs >= _EPOCHS and progress.evaluated
