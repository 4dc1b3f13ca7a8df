"""What the variables of all ranks held, look by look. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from instep.check.observations import Observed
from instep.check.records.live_state import LiveState

_ALIKE = 1e-4
"""Relative difference of numbers that is taken for rounding."""


@dataclass(frozen=True)
class LivePath:
    """A variable, or something that a variable holds, on all ranks."""

    file: str
    function: str
    names: tuple[str, ...]
    """From the variable to the attribute: `("model", "queue")`."""
    values: tuple[tuple[Any, ...], ...]
    """For each look, what rank 0, 1, … had."""

    @property
    def text(self) -> str:
        """The path as it is written in the source: `model.queue`."""
        return ".".join(self.names)

    @property
    def is_constant(self) -> bool:
        """Whether no rank's value changed; more than one look is needed to tell."""
        return len(self.values) > 1 and len(set(map(repr, self.values))) == 1

    @property
    def differs(self) -> bool:
        """Whether the ranks had different values in the last two looks, or in the only one."""
        return all(len(set(map(repr, look))) > 1 for look in self.values[-2:])

    @property
    def differs_in_numbers(self) -> bool:
        """Whether the ranks' numbers differed by more than rounding in most looks."""
        differing = sum(_differ(look) for look in self.values)
        return differing * 2 > len(self.values)

    @property
    def differs_in_numbers_last(self) -> bool:
        """Whether the ranks' numbers differed by more than rounding in the last two looks, or in the only one."""
        return all(_differ(look) for look in self.values[-2:])

    @property
    def stands_still(self) -> bool:
        """Whether a rank's value was the same in two looks, one after the other."""
        return any(before[0] == after[0] for before, after in pairwise(self.values))

    @property
    def differs_at_the_end(self) -> bool:
        """Whether the ranks' numbers differed by more than rounding in the last look."""
        return _differ(self.values[-1])

    @property
    def shown(self) -> str:
        """What the ranks had in the last look in which they differed, in words."""
        look = next((look for look in reversed(self.values) if _differ(look)), self.values[-1])
        return ", ".join(f"rank {rank}: {value:.6g}" for rank, value in enumerate(look[:4]))


def live_paths(observed: Observed, kind: str, moments: Sequence[str] = ("step", "evaluated", "left")) -> list[LivePath]:
    """Return what all ranks had in common looks, of one field of LiveState."""
    values: dict[str, list[tuple[Any, ...]]] = {}
    for looks in _looks(observed, moments):
        fields = [getattr(look, kind) for look in looks]
        for path in fields[0]:
            if all(path in one for one in fields[1:]):
                values.setdefault(path, []).append(tuple(one[path] for one in fields))
    return [_path(path, looks) for path, looks in values.items()]


def _path(path: str, values: Sequence[tuple[Any, ...]]) -> LivePath:
    file, function, names = path.split("|", 2) if "|" in path else ("", "", path)
    return LivePath(file, function, tuple(names.split(".")), tuple(values))


def _looks(observed: Observed, moments: Sequence[str]) -> Iterator[tuple[LiveState, ...]]:
    """Yield the looks that all ranks took at the same moment, after as many steps."""
    ranks = [{(look.moment, look.number, look.step): look for look in looks} for looks in observed.by_rank(LiveState)]
    for key in ranks[0] if len(ranks) > 1 else ():
        if key[0] in moments and all(key in rank for rank in ranks):
            yield tuple(rank[key] for rank in ranks)


def _differ(look: Sequence[Any]) -> bool:
    numbers = [float(value) for value in look]
    if any(number != number for number in numbers):
        return False
    return max(numbers) - min(numbers) > _ALIKE * max(abs(number) for number in numbers)
