"""Which scheduler `--pruner` names."""

from __future__ import annotations

from instep.tune import population, promotion
from instep.tune.population_scheduler import PopulationScheduler
from instep.tune.promotion_scheduler import PromotionScheduler
from instep.tune.scheduler import PruningScheduler, TrialScheduler

SCHEDULERS: dict[str, type[TrialScheduler]] = {
    promotion.NAME: PromotionScheduler,
    population.NAME: PopulationScheduler,
}
"""By name; any other name is that of a pruner of Optuna."""


def scheduler_of(pruner: str) -> type[TrialScheduler]:
    """Return the scheduler that a text such as `asha:eta=2` names."""
    return SCHEDULERS.get(pruner.partition(":")[0].lower(), PruningScheduler)
