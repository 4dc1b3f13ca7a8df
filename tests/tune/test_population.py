"""Population-based training: who copies whom, and with what values, by what is recorded alone."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from instep.core.errors import SpecError
from instep.tune.population import Copy, Member, PopulationSpec, exploit, explore, plan_population

SPACE: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(1e-4, 1e-1, log=True),
    "dropout": FloatDistribution(0.0, 0.5),
    "width": IntDistribution(16, 64, step=8),
    "act": CategoricalDistribution(("relu", "gelu")),
}
PARAMS = {"lr": 1e-2, "dropout": 0.1, "width": 32, "act": "gelu"}
SPECS = st.builds(
    PopulationSpec,
    perturbation_interval=st.integers(1, 3),
    quantile_fraction=st.sampled_from([0.1, 0.25, 0.5]),
    resample_probability=st.sampled_from([0.0, 0.25, 1.0]),
)
VALUES = st.dictionaries(st.integers(0, 40), st.floats(allow_infinity=False), min_size=1, max_size=12)


@given(SPECS, VALUES, st.lists(st.integers(50, 60), unique=True, max_size=3), st.integers(0, 9), st.booleans())
def test_the_worst_copy_the_best(
    spec: PopulationSpec, values: dict[int, float], lost: list[int], seed: int, lowest: bool
) -> None:
    copies = exploit(spec, 4, values, lost, seed, lowest)
    assert copies == exploit(spec, 4, dict(reversed(values.items())), lost, seed, lowest)
    replaced = {copy.replaces for copy in copies}
    assert (
        len(copies)
        == len(replaced)
        == min(math.ceil(len(values) * spec.quantile_fraction), len(values) // 2) + len(lost)
    )
    assert replaced >= set(lost)
    sources = {copy.trial for copy in copies}
    assert not sources & replaced
    worths = {n: -math.inf if math.isnan(v) else -v if lowest else v for n, v in values.items()}
    for source in sources:
        assert all(worths[source] >= worths[n] for n in replaced - set(lost))


@given(SPECS, st.integers(0, 999), st.sampled_from([(), ("lr", "width"), ("dropout", "act")]))
def test_values_stay_in_their_ranges(spec: PopulationSpec, seed: int, names: tuple[str, ...]) -> None:
    spec = PopulationSpec(1, 0.25, spec.resample_probability, names)
    params = explore(spec, Copy(0, 2, 1), PARAMS, SPACE, seed)
    assert params == explore(spec, Copy(0, 2, 1), PARAMS, SPACE, seed)
    assert list(params) == list(PARAMS)
    changed = set(names or ("lr", "dropout")) - {"act"}
    for name, distribution in SPACE.items():
        assert distribution._contains(distribution.to_internal_repr(params[name])), name
        assert type(params[name]) is type(PARAMS[name])
        if name not in changed or spec.resample_probability == 0:
            low, high = PARAMS[name], PARAMS[name]
            if name in changed:
                assert params[name] != PARAMS[name]
                low, high = PARAMS[name] * 0.75, PARAMS[name] * 1.25  # type: ignore[operator]
            assert low <= params[name] <= high  # type: ignore[operator]


def test_values_at_the_end_of_a_range() -> None:
    spec = PopulationSpec(resample_probability=0.0, hyperparam_mutations=("lr", "width"))
    for seed in range(30):
        params = explore(spec, Copy(0, 1, 1), {**PARAMS, "lr": 1e-1, "width": 64}, SPACE, seed)
        assert params["lr"] in (1e-1, 1e-1 * 0.8)
        assert params["width"] in (64, 48)


class Population:
    """A search without trainings: the value of a trial follows from its number and the evaluation."""

    def __init__(self, spec: PopulationSpec, size: int, ends: int, failing: set[int]) -> None:
        self.spec, self.size, self.ends, self.failing = spec, size, ends, failing
        self.trials = [Member({}) for _ in range(size)]

    def plan(self) -> Any:
        return plan_population(self.spec, self.size, self.trials, 0, is_lowest_best=False)

    def waiting(self) -> list[int]:
        """Record what is due, and return the members that are to be trained."""
        plan = self.plan()
        for copy in plan.copies:
            assert self.trials[copy.trial].values[copy.evaluation] is not None
            self.trials.append(Member({}, copy=copy))
            assert self.plan().copies == tuple(c for c in plan.copies if c not in {t.copy for t in self.trials})
        plan = self.plan()
        for number, successor in plan.replaced:
            member = self.trials[number]
            self.trials[number] = Member(member.values, True, member.is_complete, member.copy)
            assert self.trials[successor].copy.replaces == number  # type: ignore[union-attr]
        unfinished = [m for m in plan.members if not self.trials[m].is_finished]
        return [m for m in unfinished if plan.until not in self.trials[m].values]

    def train(self, number: int) -> None:
        """Train a member to the end of its generation, or to its own."""
        until, member = self.plan().until, self.trials[number]
        first = member.copy.evaluation if member.copy is not None else 0
        begin = max(member.values, default=first) + 1
        values = dict(member.values)
        for evaluation in range(begin, min(until, self.ends) + 1):
            if number in self.failing and evaluation == self.ends // 2:
                self.trials[number] = Member(values, True, False, member.copy)
                return
            values[evaluation] = random.Random(f"{number} {evaluation}").random()
        self.trials[number] = Member(values, until >= self.ends, until >= self.ends, member.copy)


@given(SPECS, st.integers(2, 6), st.integers(1, 9), st.sets(st.integers(0, 12), max_size=3), st.randoms())
def test_any_order_of_trainings_gives_the_same_trials(
    spec: PopulationSpec, size: int, ends: int, failing: set[int], rng: random.Random
) -> None:
    """Several at once, in whichever order they end; and nothing but the records is known."""
    serial, other = Population(spec, size, ends, failing), Population(spec, size, ends, failing)
    for population, choose in ((serial, min), (other, rng.choice)):
        for _ in range(2000):
            if not (waiting := population.waiting()):
                break
            population.train(choose(waiting))
        assert not population.waiting()
    assert other.trials == serial.trials
    assert all(trial.is_finished for trial in serial.trials), "nobody waits in the end"
    if not failing:
        assert sum(trial.is_complete for trial in serial.trials) == size
        copies = [trial for trial in serial.trials if trial.copy is not None]
        assert len(copies) > 0 or ends <= spec.perturbation_interval


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pbt:interval=2", "'interval=2' is not NAME=VALUE with one of perturbation_interval, quantile_fraction"),
        ("pbt:perturbation_interval=0", "perturbation_interval must be at least 1"),
        ("pbt:perturbation_interval=1.5", "perturbation_interval=1.5 is not a whole number"),
        ("pbt:quantile_fraction=0.6", "quantile_fraction must be above 0 and at most 0.5"),
        ("pbt:resample_probability=x", "resample_probability=x is not a number"),
    ],
)
def test_what_cannot_be(text: str, sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        PopulationSpec.parse(text)
    assert sentence in str(refused.value)


def test_texts() -> None:
    text = "pbt:perturbation_interval=2,quantile_fraction=.5,hyperparam_mutations=lr+momentum"
    assert PopulationSpec.parse(text) == PopulationSpec(2, 0.5, 0.25, ("lr", "momentum"))
    assert PopulationSpec.parse("pbt") == PopulationSpec()
