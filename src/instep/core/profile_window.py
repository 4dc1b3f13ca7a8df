"""Which steps and ranks `--profile` and `--profile-ranks` mean."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from instep.core.errors import SpecError

AUTO, ALL = "auto", "all"
STEPS_PATTERN = rf"{AUTO}|\d+(:\d+)?"
"""What a value of `--profile` looks like."""
_FIRST, _NUM_STEPS = 10, 5
"""Of `auto`: by then, caches are warm and code is compiled."""
_SLOW = 1.1
"""The slowest rank is profiled, too, if its own work takes this many times as long as that of the others."""


@dataclass(frozen=True)
class ProfileWindow:
    """The steps whose operations are recorded, counted from 1. The step after them records memory."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    @classmethod
    def parse(cls, text: str) -> ProfileWindow | None:
        """Return the steps that a value of `--profile` names; None: auto. `20:25` are the steps 20 to 24."""
        if text == AUTO:
            return None
        if not re.fullmatch(STEPS_PATTERN, str(text)):
            raise SpecError(f"profile={text!r} names no steps. Write for instance 20:25 for the steps 20 to 24, or 20.")
        first, _, end = str(text).partition(":")
        window = cls(int(first), int(end) - 1 if end else int(first))
        if window.first < 1 or window.last < window.first:
            raise SpecError(
                f"profile={text!r} contains no step: steps are counted from 1, and the second number is the first "
                "step that is not profiled. Write for instance 20:25 for the steps 20 to 24."
            )
        return window

    @classmethod
    def plan(cls, text: str, step: int, num_steps: int | None) -> ProfileWindow | None:
        """Return the steps to profile in a training that continues after `step`; None: it makes none of them.

        `num_steps`: when it ends; None: unknown. By default they are a few after a warm-up, or the last ones of a short
        training, with one step left for memory.
        """
        asked = cls.parse(text)
        if asked is None:
            last = step + _FIRST + _NUM_STEPS - 1
            if num_steps is not None:
                last = max(step + 1, min(last, num_steps - 1))
            asked = cls(max(step + 1, last - _NUM_STEPS + 1), last)
        if asked.last <= step or (num_steps is not None and asked.first > num_steps):
            return None
        return cls(max(asked.first, step + 1), asked.last)


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """Return the ranks that a value of `--profile-ranks` names; None: auto or all."""
    if text in (AUTO, ALL):
        return None
    if not re.fullmatch(r"\d+(,\d+)*", str(text)):
        raise SpecError(f"profile_ranks={text!r} names no ranks. Write for instance 0,3, or all.")
    return tuple(sorted({int(rank) for rank in str(text).split(",")}))


def check_ranks(text: str, world_size: int) -> None:
    """Raise SpecError for ranks to profile that a world does not have."""
    missing = [rank for rank in parse_ranks(text) or () if rank >= world_size]
    if missing:
        last = f"the last rank is {world_size - 1}" if world_size > 1 else "there is only rank 0"
        raise SpecError(f"profile_ranks={text} names rank {missing[0]}, and {last}. Leave it out.")


def choose_ranks(text: str, own_s: Sequence[float]) -> list[int]:
    """Return the ranks to profile, given how long each rank's own work took.

    By default rank 0, and the slowest one if it is notably slower than the others.
    """
    named = parse_ranks(text)
    if named is not None:
        return [rank for rank in named if rank < len(own_s)]
    if text == ALL:
        return list(range(len(own_s)))
    slowest = max(range(len(own_s)), key=lambda rank: own_s[rank])
    others = [seconds for rank, seconds in enumerate(own_s) if rank != slowest]
    is_slow = bool(others) and own_s[slowest] > _SLOW * statistics.median_high(others)
    return sorted({0, slowest}) if is_slow else [0]


def check_profile(profile: str | None, ranks: str) -> None:
    """Raise SpecError for values of the two options that mean nothing."""
    if profile is not None:
        ProfileWindow.parse(profile)
    parse_ranks(ranks)
    if profile is None and ranks != AUTO:
        raise SpecError(f"profile_ranks={ranks} is for --profile, which is not given. Add --profile.")
