"""The seam for finders: one small class, one registry line for each.

A finder launches short trainings of a Task in a scratch folder, and returns a `Finding`: what to use, why, and what was
measured. To add one, write a subclass of `Finder` and add its line to `FINDERS` in core/finders.py; `--find NAME` then
selects it.

Ranks: none; this is the process that launches them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from instep.core.finders import FINDERS, check_finder
from instep.core.spec import TrainSpec
from instep.train.source import TaskSource


@dataclass(frozen=True)
class FindRequest:
    """What a finder works with."""

    source: TaskSource
    spec: TrainSpec
    """How the training that it is about would run; `processes` is a number."""
    over: str = ""
    """What to try, as a person wrote it: `1e-6..1`, `0,1,2`; empty: the finder chooses."""
    num_rounds: int = 4
    """How often each candidate is timed."""
    say: Callable[[str], None] = lambda _text: None
    """Reports progress."""

    @property
    def processes(self) -> int:
        """The world size."""
        return int(self.spec.processes)

    @property
    def data_size(self) -> int:
        """How many ranks a batch is divided between."""
        return self.spec.mesh_of(self.processes).data_size


@dataclass(frozen=True)
class Series:
    """A named curve; `lows` and `highs` are the ends of intervals, if there are any."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float | None] = ()
    highs: Sequence[float | None] = ()


@dataclass(frozen=True)
class Plot:
    """What a finder measured, to be drawn: curves over a logarithmic axis."""

    title: str
    x_label: str
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()
    """Where vertical lines are, and what they mean."""


@dataclass(frozen=True)
class Finding:
    """What a finder found."""

    finder: str
    suggestion: Any
    """None: nothing can be suggested; the sentences say why."""
    sentences: tuple[str, ...]
    """The suggestion with its reason first."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Options of the training to change, by name."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Task to change, by name."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Plain values, for JSON."""
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    """A table of what was measured."""
    plots: tuple[Plot, ...] = ()


class Finder(ABC):
    """Finds one setting by measurement."""

    @abstractmethod
    def check(self, request: FindRequest) -> None:
        """Raise SpecError for a request that cannot be measured, before anything is launched."""

    @abstractmethod
    def find(self, request: FindRequest) -> Finding:
        """Measure, and return what was found. What it launches ends with it, also after an interrupt."""


def open_finder(name: str) -> Finder:
    """Return the finder of a name; raise SpecError, with the names, if there is none."""
    check_finder(name)
    finder = resolve_name(FINDERS[name])()
    assert isinstance(finder, Finder)
    return finder
