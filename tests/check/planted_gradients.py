"""Observations of gradients, written by hand: what two ranks would have written down about their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from instep.check.finding import Finding
from instep.check.observations import Observation, Observed
from instep.check.records.gradients import (
    BackwardRan,
    ForwardRan,
    GradientEvent,
    GradientsCleared,
    ModelWrapped,
    OptimizerBuilt,
    StepTaken,
)
from instep.check.rule import Evidence, Rule, judge_all
from instep.check.source.module import SourceModule

FILE = "train.py"
NAMES = ["a.weight", "a.bias"]
LINES = {ForwardRan: 10, BackwardRan: 11, GradientsCleared: 12, StepTaken: 13, OptimizerBuilt: 2, ModelWrapped: 1}

_DEFAULTS: dict[type[GradientEvent], dict[str, Any]] = {
    ModelWrapped: {"wrapper": 0, "strategy": "ddp", "names": NAMES, "ranks": [0, 1]},
    OptimizerBuilt: {"optimizer": 0, "num_parameters": 2},
    ForwardRan: {"wrapper": 0, "reduces": True, "enabled": True},
    BackwardRan: {"loss": 1.0, "factor": 1.0, "reduction": "mean", "cleared": [0]},
    GradientsCleared: {"optimizer": 0, "lost": True, "in_step": False},
    StepTaken: {
        "optimizer": 0,
        "num_parameters": 2,
        "num_without_gradient": 0,
        "all_zero": False,
        "orphans": 0,
        "num_collectives": 0,
        "learning_rate": 0.1,
        "is_detailed": True,
        "parameter_hash": {"0": 1},
        "names": NAMES,
        "wrappers": [0, 0],
        "hashes": [1, 1],
        "norms": [1.0, 1.0],
        "gradient_hash": {"0": 1},
        "gradient_norm": {"0": 1.0},
        "parameter_hashes": [1, 1],
    },
}


def event(kind: type[GradientEvent], **fields: Any) -> Callable[[int, int], GradientEvent]:
    """Return what makes an event once its place on the timeline and the number of its step are known."""

    def make(order: int, number: int) -> GradientEvent:
        values = {"file": FILE, "line": LINES.get(kind, 9), "order": order, **_DEFAULTS.get(kind, {}), **fields}
        if kind is StepTaken:
            values.setdefault("number", number)
        return kind(**values)

    return make


def timeline(*events: Callable[[int, int], GradientEvent]) -> list[Observation]:
    """Return the events of one rank, in this order."""
    made: list[Observation] = []
    for order, make in enumerate(events):
        made.append(make(order, sum(isinstance(before, StepTaken) for before in made)))
    return made


def gradients(value: float, wrapper: int = 0, **fields: Any) -> Callable[[int, int], GradientEvent]:
    """Return a step whose gradients are a number that may differ by rank."""
    key = str(wrapper)
    values: dict[str, Any] = {
        "hashes": [int(value * 100)] * 2,
        "norms": [value] * 2,
        "wrappers": [wrapper] * 2,
        "gradient_hash": {key: int(value * 100)},
        "gradient_norm": {key: value},
    }
    return event(StepTaken, **(values | fields))


def judged(rule: Rule, *ranks: Sequence[Observation], source: str = "pass\n") -> list[Finding]:
    """Return what a rule finds in the observations of all ranks, and in the source."""
    return judge_all([rule], Evidence([SourceModule(FILE, source)], Observed(ranks)))


def read(rule: Rule, source: str) -> list[Finding]:
    """Return what a rule finds in a file that does not run."""
    return judge_all([rule], Evidence([SourceModule(FILE, source)]))
