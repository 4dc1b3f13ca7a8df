"""The seam for trial schedulers: how far each trial is trained, which one ends early, and which one continues.

A scheduler is chosen by `--pruner`. To add one, write a module with a subclass of `TrialScheduler` and add its line to
`SCHEDULERS` in schedulers.py; all other names are those of Optuna's pruners.

Ranks: none; all decisions are made in the main thread of the process that launches the trials, and where several
processes share a search, under its lock ([Note: A shared search]).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from optuna.trial import FrozenTrial

from instep.tune.folder import SearchFolder
from instep.tune.named import make_pruner
from instep.tune.study import SearchStudy
from instep.tune.trial_run import TrialPlan

if TYPE_CHECKING:
    from instep.tune.plan import SearchPlan

Ending = Literal["complete", "preempted", "failed"]
"""How a training ended."""


class Verdict(Enum):
    """What follows from an evaluation of a trial."""

    IGNORED = "ignored"
    """It does not count, or not yet."""
    CONTINUES = "continues"
    PRUNED = "pruned"
    """The trial is to save and leave, for good."""
    PAUSED = "paused"
    """The trial is to save and leave, and may be continued."""


class TrialScheduler(ABC):
    """Decides how far trials are trained. All that it knows comes from the study, so that a kill changes nothing."""

    judges_again: ClassVar[bool] = False
    """Whether evaluations of a trial that was running are forgotten when a search continues, and reported again."""
    has_rungs: ClassVar[bool] = False
    """Whether `--rung-processes` has a meaning."""
    waits_for_all: ClassVar[bool] = False
    """Whether there may be something to do again when trials of other processes have ended."""
    paused_are_known: ClassVar[bool] = True
    """Whether a sampler learns from trials that are paused, as from pruned ones."""

    def __init__(self, plan: SearchPlan, study: SearchStudy, folder: SearchFolder) -> None:
        self.plan, self.study, self.folder = plan, study, folder

    @classmethod
    @abstractmethod
    def check_name(cls, pruner: str) -> None:
        """Raise SpecError for a text that is wrong, whatever is searched."""

    @classmethod
    def check(cls, plan: SearchPlan) -> None:
        """Raise SpecError for what this scheduler cannot do with a search."""
        cls.check_name(plan.tune.pruner)

    @classmethod
    def describe(cls, plan: SearchPlan) -> dict[str, Any]:  # noqa: ARG003 - for subclasses
        """Return what else must stay the same when the search continues."""
        return {}

    @abstractmethod
    def begin(self, trial: FrozenTrial) -> bool:
        """Take in a trial as it was recorded; return whether it is paused."""

    @abstractmethod
    def take(self, number: int, evaluation: int, value: float) -> Verdict:
        """Take in an evaluation of a trial, counted from 1."""

    def end(self, number: int, ending: Ending) -> bool:  # noqa: ARG002 - for subclasses
        """Note that a training has ended; return whether the trial is paused now."""
        return False

    def adapt(self, plan: TrialPlan) -> TrialPlan:
        """Return a trial as it is to be trained now: on how many processes, how far."""
        return plan

    def resume(self, paused: set[int]) -> int | None:  # noqa: ARG002 - for subclasses
        """Return the trial to continue next, of those that are paused; it may add to them. None: none may."""
        return None

    def resume_last(self, paused: AbstractSet[int]) -> int | None:  # noqa: ARG002 - for subclasses
        """Return the trial to continue if nothing else is left to do and no trial is complete; None: none."""
        return None

    def sentence(self, number: int) -> str:
        """Return why a trial that is paused is not continued."""
        return f"not continued after evaluation {max(self.study.trials[number].intermediate_values, default=0)}"


class PruningScheduler(TrialScheduler):
    """Trials run to their end, unless a pruner of Optuna ends them."""

    judges_again = True

    @classmethod
    def check_name(cls, pruner: str) -> None:
        """Raise SpecError for a pruner that cannot be made."""
        make_pruner(pruner)

    def begin(self, trial: FrozenTrial) -> bool:  # noqa: ARG002 - none is ever paused
        """Return False."""
        return False

    def take(self, number: int, evaluation: int, value: float) -> Verdict:
        """Report an evaluation, and ask the pruner."""
        if self.plan.tune.is_shared:
            self.study.sync()  # a pruner compares with the trials of all processes
        return Verdict.PRUNED if self.study.evaluate(number, evaluation, value) else Verdict.CONTINUES
