"""Population-based training (PBT): which trials copy which, and with what hyper-parameters. Pure.

[Note: Population-based training]
A population of trials is trained side by side. After every `perturbation_interval` evaluations all of them have paused
at the same step, and the worst quarter is replaced: a trial of it ends, and a new one continues from the checkpoint of
one of the best quarter, with its values changed a little. (Jaderberg et al., "Population based training of neural
networks", 2017; the words are those of Ray Tune's PopulationBasedTraining with synch=True.)

Who copies whom depends on the seed and on the values at that evaluation alone, not on which trial was faster: so a
search is the same with several trials at once, in several processes and on Ray, and in exact mode to the last bit. No
member waits for nothing either: while some have not come as far, they are what the others' processes train.

What there is to do is not kept anywhere. `plan_population` derives it from the trials as they are recorded, generation
by generation: a value at the end of a generation is recorded only when the trial has paused there with a checkpoint, a
copy is recorded with whom it copies and replaces. A search that continues after a kill finds the same.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from instep.core.errors import SpecError

NAME = "pbt"
_FACTORS = (0.8, 1.2)


@dataclass(frozen=True)
class PopulationSpec:
    """How a population changes. The names are those of Ray Tune."""

    perturbation_interval: int = 1
    """Evaluations between two changes."""
    quantile_fraction: float = 0.25
    """The part of the population that is replaced, and the part that is copied."""
    resample_probability: float = 0.25
    """How often a value is drawn anew from its range, instead of being multiplied by 0.8 or 1.2."""
    hyperparam_mutations: tuple[str, ...] = ()
    """What is changed; empty: all ranges of fractional numbers."""

    @classmethod
    def parse(cls, text: str) -> PopulationSpec:
        """Return what `pbt` or `pbt:perturbation_interval=2,hyperparam_mutations=lr+momentum` says."""
        options: dict[str, Any] = {}
        for word in filter(None, text.partition(":")[2].split(",")):
            key, _, value = word.partition("=")
            if key not in cls.__dataclass_fields__ or not value:
                known = ", ".join(cls.__dataclass_fields__)
                raise SpecError(f"pruner={text!r}: {word!r} is not NAME=VALUE with one of {known}.")
            options[key] = tuple(value.split("+")) if key == "hyperparam_mutations" else _number(text, key, value)
        spec = cls(**options)
        if spec.perturbation_interval < 1:
            raise SpecError(f"pruner={text!r}: perturbation_interval must be at least 1, in evaluations.")
        if not 0 < spec.quantile_fraction <= 0.5 or not 0 <= spec.resample_probability <= 1:
            raise SpecError(
                f"pruner={text!r}: quantile_fraction must be above 0 and at most 0.5, resample_probability between 0 "
                "and 1."
            )
        return spec


def _number(text: str, key: str, value: str) -> float:
    is_count = key == "perturbation_interval"
    if not re.fullmatch(r"\d+" if is_count else r"\d*\.?\d+", value):
        raise SpecError(f"pruner={text!r}: {key}={value} is not {'a whole number' if is_count else 'a number'}.")
    return int(value) if is_count else float(value)


class Copy(NamedTuple):
    """Which trial a trial continues, and which one it replaces."""

    trial: int
    """The one whose checkpoint it has."""
    evaluation: int
    """How many evaluations that one had made."""
    replaces: int


@dataclass(frozen=True)
class Member:
    """A trial as it is recorded."""

    values: Mapping[int, float]
    """By evaluation, counted from 1."""
    is_finished: bool = False
    is_complete: bool = False
    copy: Copy | None = None

    def completed_at(self, evaluation: int) -> bool:
        """Return whether the training was over at an evaluation, or before."""
        return self.is_complete and max(self.values, default=0) <= evaluation


class PopulationPlan(NamedTuple):
    """What there is to do."""

    until: int
    """The evaluation up to which members are trained now."""
    members: tuple[int, ...]
    copies: tuple[Copy, ...] = ()
    """Those that come before anything else: trials that have to be recorded."""
    replaced: tuple[tuple[int, int], ...] = ()
    """Trials that a copy has replaced, each with that copy."""


def plan_population(
    spec: PopulationSpec, size: int, trials: Sequence[Member], seed: int, is_lowest_best: bool
) -> PopulationPlan:
    """Return what there is to do in a population, by its trials so far. See [Note: Population-based training]."""
    members = list(range(min(size, len(trials))))
    successors = {trial.copy.replaces: number for number, trial in enumerate(trials) if trial.copy is not None}
    replaced: list[tuple[int, int]] = []
    until = spec.perturbation_interval
    while True:
        is_under_way = any(not trials[m].is_finished and until not in trials[m].values for m in members)
        alive = [m for m in members if until in trials[m].values and not trials[m].completed_at(until)]
        if len(members) < size or is_under_way or not alive:
            return PopulationPlan(until, tuple(members), (), tuple(replaced))
        values = {m: trials[m].values[until] for m in alive}
        lost = [m for m in members if m not in values and not trials[m].is_complete]
        copies = exploit(spec, until, values, lost, seed, is_lowest_best)
        if due := [copy for copy in copies if copy.replaces not in successors]:
            return PopulationPlan(until, tuple(members), tuple(due), tuple(replaced))
        changed = {copy.replaces: successors[copy.replaces] for copy in copies}
        replaced += changed.items()
        members = [changed.get(m, m) for m in [*alive, *lost]]
        size, until = len(members), until + spec.perturbation_interval


def exploit(
    spec: PopulationSpec,
    evaluation: int,
    values: Mapping[int, float],
    lost: Sequence[int],
    seed: int,
    is_lowest_best: bool,
) -> list[Copy]:
    """Return who copies whom: the worst quantile and the trials that are `lost` copy one of the best quantile each."""
    sign = 1.0 if is_lowest_best else -1.0
    worths = {number: math.inf if math.isnan(value) else sign * value for number, value in values.items()}
    ranked = sorted(worths, key=lambda number: (worths[number], number))
    count = min(math.ceil(len(ranked) * spec.quantile_fraction), len(ranked) // 2)
    best, worst = ranked[: max(count, 1)], ranked[len(ranked) - count :]
    rngs = {number: random.Random(f"{seed} {evaluation} {number}") for number in [*worst, *lost]}
    return [Copy(rng.choice(best), evaluation, number) for number, rng in rngs.items()]


def explore(
    spec: PopulationSpec,
    copy: Copy,
    params: Mapping[str, Any],
    distributions: Mapping[str, BaseDistribution],
    seed: int,
) -> dict[str, Any]:
    """Return the parameters of a copy: those of the trial that it continues, some of them changed."""
    rng = random.Random(f"{seed} {copy.evaluation} {copy.replaces} values")
    names = [name for name in params if name in mutations_of(spec, distributions)]
    return {**params, **{name: _changed(spec, params[name], distributions[name], rng) for name in names}}


def mutations_of(spec: PopulationSpec, distributions: Mapping[str, BaseDistribution]) -> list[str]:
    """Return which of these parameters are changed."""
    if not spec.hyperparam_mutations:
        return [name for name, kind in distributions.items() if isinstance(kind, FloatDistribution)]
    numbers = (FloatDistribution, IntDistribution)
    return [name for name in spec.hyperparam_mutations if isinstance(distributions.get(name), numbers)]


def _changed(spec: PopulationSpec, value: Any, distribution: BaseDistribution, rng: random.Random) -> Any:
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    is_drawn, share, factor = rng.random() < spec.resample_probability, rng.random(), rng.choice(_FACTORS)
    if is_drawn and distribution.log:
        new = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    elif is_drawn:
        new = low + share * (high - low)
    else:
        new = value * factor
    if step is not None:
        nearest = low + round((new - low) / step) * step
        new = nearest if is_drawn or nearest != value else value + math.copysign(step, factor - 1)
    new = min(max(new, low), high)
    return int(new) if isinstance(distribution, IntDistribution) else float(new)
