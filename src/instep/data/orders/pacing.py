"""Pacing: how much of the data, or of each sample, is in use after how many steps. Pure arithmetic.

It grows in levels rather than in every step, so that what holds at a step is known from a short table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from instep.core.errors import SpecError

_LEVELS = 20
"""In how many levels it grows, unless a person says it: more would hardly show, and each takes a lookup."""
_BUCKETS = 5
"""The same for pacing="steps"."""
_START = 0.2

Growth = Callable[[float, float, float], float]
"""Returns the fraction at a progress, from the first and the last fraction."""

PACINGS: dict[str, Growth] = {
    "linear": lambda progress, start, end: start + (end - start) * progress,
    # As much time for each new sample as the others then have: Platanios et al., 2019.
    "root": lambda progress, start, end: math.sqrt(start * start + (end * end - start * start) * progress),
    "exponential": lambda progress, start, end: start * (end / start) ** progress,
    "steps": lambda progress, start, end: start + (end - start) * progress,
}


class Level(NamedTuple):
    """From which step on which fraction is in use."""

    first_step: int
    fraction: float


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """How a fraction grows over the first steps or epochs of a training; complete and checked once it is made."""

    pacing: str | Callable[[float], float] = "linear"
    start: float | None = None
    end: float | None = None
    steps: int | None = None
    epochs: int | None = None
    buckets: int | None = None

    def __post_init__(self) -> None:
        self._check_duration()
        if isinstance(self.pacing, str) and self.pacing not in PACINGS:
            raise SpecError(
                f"pacing={self.pacing!r} is unknown. Choose {', '.join(map(repr, PACINGS))}, or give a function that "
                "returns the fraction of the samples for a progress in 0..1."
            )
        if not isinstance(self.pacing, str) and (self.start is not None or self.end is not None):
            raise SpecError("start and end are for the named pacings. Let your function return them for 0 and 1.")
        for name in ("start", "end"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise SpecError(f"{name}={value} is not possible: it is a fraction of the samples, above 0, at most 1.")
        if self.start is not None and self.start > self._last:
            raise SpecError(f"start={self.start} is more than end={self._last}: the samples in use grow.")
        if self.buckets is not None and self.buckets < 2:
            raise SpecError(f"buckets={self.buckets} is not possible: to grow, at least 2 are needed.")

    def _check_duration(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            given = "neither is given" if self.steps is None else f"steps={self.steps} and epochs={self.epochs}"
            raise SpecError(f"A curriculum grows over steps=… or epochs=…: {given}. Say one of them.")
        for name in ("steps", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name}={value} is not possible: a curriculum grows over at least 1.")

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return over how many steps it grows."""
        return self.steps if self.steps is not None else (self.epochs or 0) * steps_per_epoch

    def num_epochs(self, steps_per_epoch: int) -> int:
        """Return in how many epochs it grows; the last one may have steps after it."""
        return -(-self.num_steps(steps_per_epoch) // steps_per_epoch)

    def levels(self, steps_per_epoch: int) -> list[Level]:
        """Return the levels, the last of which has the final fraction and begins when the pacing is over."""
        total = self.num_steps(steps_per_epoch)
        count = min(total, (self.buckets or (_BUCKETS if self.pacing == "steps" else _LEVELS + 1)) - 1)
        return [Level(-(-total * i // count), self.fraction(i / count)) for i in range(count + 1)]

    def fraction(self, progress: float) -> float:
        """Return the fraction at a progress of 0..1; raise SpecError for one that is none."""
        if isinstance(self.pacing, str):
            return min(1.0, PACINGS[self.pacing](progress, self._first, self._last))
        value = self.pacing(progress)
        if not 0 < value <= 1:
            raise SpecError(
                f"pacing({progress}) returned {value}. It is the fraction of the samples that are in use: above 0, at "
                "most 1."
            )
        return float(value)

    @property
    def _last(self) -> float:
        return 1.0 if self.end is None else self.end

    @property
    def _first(self) -> float:
        if self.start is not None:
            return self.start
        return min(self._last, 1 / (self.buckets or _BUCKETS) if self.pacing == "steps" else _START)
