"""Asynchronous successive halving with promotion (ASHA): how far each trial is trained. Pure.

[Note: Promotion]
All trials are trained to the first rung, which is a number of evaluations. There each of them is paused: it saves and
leaves, and its run directory stays. Of the trials that have reached a rung, the best one in `eta` is promoted: it
continues from its checkpoint, to a rung that is `eta` times as far, perhaps on more processes. A trial that comes to
the end of its training is complete. Before a new trial is started, one that can be promoted is continued, from the
highest rung on. (Li et al., "A system for massively parallel hyperparameter tuning", 2020.)

With several brackets (Hyperband), every other trial's first rung is `eta` times as far, and so on: for metrics whose
first values say little about the last ones.

What a trial has evaluated beyond its rung before it could stop does not count until it is promoted. So decisions depend
on the evaluations alone, and can be made again by a process that continues the search: all that it needs are the values
that the storage has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from instep.core.errors import SpecError

NAME = "asha"


@dataclass(frozen=True)
class PromotionSpec:
    """How far the rungs are apart."""

    eta: int = 3
    """One in so many trials of a rung is promoted, to a rung that is so many times as far."""
    first: int = 1
    """Evaluations at the first rung."""
    brackets: int = 1

    @classmethod
    def parse(cls, text: str) -> PromotionSpec:
        """Return what `asha` or `asha:eta=3,first=1,brackets=1` says."""
        options: dict[str, int] = {}
        for word in filter(None, text.partition(":")[2].split(",")):
            key, _, value = word.partition("=")
            if key not in cls.__dataclass_fields__ or not re.fullmatch(r"\d+", value):
                known = ", ".join(cls.__dataclass_fields__)
                raise SpecError(f"pruner={text!r}: {word!r} is not NAME=NUMBER with one of {known}.")
            options[key] = int(value)
        spec = cls(**options)
        if spec.eta < 2 or spec.first < 1 or spec.brackets < 1:
            raise SpecError(f"pruner={text!r}: eta must be at least 2, first and brackets at least 1.")
        return spec


class Promotion:
    """Which trials are paused at which rung, and which one continues."""

    def __init__(self, spec: PromotionSpec, is_lowest_best: bool) -> None:
        self._spec, self._sign = spec, -1.0 if is_lowest_best else 1.0
        self._worths: dict[int, list[float]] = {}
        """By trial: what it was worth at each rung that it has reached."""
        self._targets: dict[int, int] = {}
        """By trial: the rung that it is trained to."""

    def begin(self, number: int, reported: Mapping[int, float]) -> bool:
        """Take in a trial, of which these evaluations were counted so far; return whether it is paused at a rung."""
        self._worths[number], self._targets[number] = [], 0
        for evaluation in sorted(reported):
            self.reach(number, evaluation, reported[evaluation])
        rungs = len(self._worths[number])
        is_paused = rungs > 0 and max(reported) == self._evaluations(number, rungs - 1)
        self._targets[number] = rungs - 1 if is_paused else rungs
        return is_paused

    def reach(self, number: int, evaluation: int, value: float) -> bool:
        """Count an evaluation, all before it having been counted; return whether it is at a rung."""
        worths = self._worths[number]
        if evaluation != self._evaluations(number, len(worths)):
            return False
        worths.append(-math.inf if math.isnan(value) else self._sign * value)
        return True

    def allowed(self, number: int) -> int:
        """Return the evaluation up to which a trial counts now."""
        return self._evaluations(number, self._targets[number])

    def rung(self, number: int) -> int:
        """Return the rung that a trial is trained to, or paused at; counted from 0."""
        return self._targets[number]

    def promote(self, paused: set[int]) -> int | None:
        """Promote the trial that continues next, of those that are paused; None: none of them may."""
        top = max(map(len, self._worths.values()), default=0)
        for rung in reversed(range(top)):
            for bracket in range(self._spec.brackets):
                ranked = self._ranked(rung, bracket)
                for number in ranked[: len(ranked) // self._spec.eta]:
                    if number in paused and self._targets[number] == rung:
                        return self._promoted(number)
        return None

    def promote_best(self, paused: set[int]) -> int | None:
        """Promote the best of those that are paused at the highest rung: a search has to have a winner."""
        if not paused:
            return None
        top = max(self._targets[number] for number in paused)
        there = [number for number in paused if self._targets[number] == top]
        return self._promoted(min(there, key=lambda number: (-self._worths[number][top], number)))

    def _promoted(self, number: int) -> int:
        self._targets[number] += 1
        return number

    def _ranked(self, rung: int, bracket: int) -> list[int]:
        """Return the trials of a bracket that have reached a rung, best first."""
        there = [n for n, worths in self._worths.items() if len(worths) > rung and n % self._spec.brackets == bracket]
        return sorted(there, key=lambda number: (-self._worths[number][rung], number))

    def _evaluations(self, number: int, rung: int) -> int:
        return int(self._spec.first * self._spec.eta ** (rung + number % self._spec.brackets))


def read_rung_processes(text: str | None) -> tuple[int, ...]:
    """Return the numbers of processes by rung that `1,2,4` names; empty: all trials have the same."""
    if text is None:
        return ()
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise SpecError(f"rung_processes={text!r} is not a list of numbers of processes. Write for instance 1,2,4.")
    return tuple(map(int, text.split(",")))
