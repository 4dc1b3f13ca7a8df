"""Which parameters are trained, in the course of a run.

[Note: Freezing]
A rule says for each step which parameters are frozen: a function of the step and its epoch alone, which every rank
calls. So all ranks freeze the same ones without asking each other, and a run that continues has nothing to restore. A
frozen parameter requires no gradient, so the backward pass does not compute one, and an optimizer leaves a parameter
without a gradient as it is: no weight decay, its state stays. The reducer is made anew for what is left, so that its
buckets hold nothing else, and travel while backward runs.
"""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from instep.core.errors import TaskError
from instep.core.plural import plural
from instep.train.train_state import TrainState

FrozenRule = Callable[[int, int], Iterable[str]]
"""Returns the names, or patterns of names, of what is frozen in a step (from 1) of an epoch (from 0)."""


class Freezing:
    """Applies a rule to the first model of a run, between two steps."""

    def __init__(self, rule: FrozenRule, models: Sequence[TrainState], notice: Callable[[str], None]) -> None:
        if not models:
            raise TaskError("run.freeze() before run.prepare(): there is no model yet.")
        trained = models[0]
        if not trained.strategy.has_all_names:
            raise TaskError(
                f"frozen() says what is frozen by its name, and with strategy={trained.strategy.name} a rank knows the "
                "names of its own layers only. Use another strategy, or set requires_grad to False in model()."
            )
        self._rule, self._trained, self._notice = rule, trained, notice
        self._patterns: tuple[str, ...] = ()
        self._named = list(trained.model.named_parameters(remove_duplicate=False))
        self._own = {p for _, p in self._named if p.requires_grad}
        """Those that the model itself trains."""

    def begin_step(self, step: int, epoch: int) -> None:
        """Freeze what is to be frozen in this step, and nothing else. Called on all ranks."""
        patterns = self._rule(step, epoch)
        if isinstance(patterns, str):
            raise TaskError(f"frozen() returned the string {patterns!r}. Return a list of names: [{patterns!r}].")
        if (patterns := tuple(patterns or ())) == self._patterns:
            return
        self._patterns = patterns
        frozen = self._own & {p for pattern in patterns for p in self._match(pattern)}
        if frozen == self._own:
            raise TaskError(
                f"frozen() leaves nothing to train in step {step}: {', '.join(patterns)} are all parameters."
            )
        self._trained.freeze(frozen)
        what = (
            f"{', '.join(patterns)} ({len(frozen)} of {plural(len(self._own), 'parameter')})" if frozen else "nothing"
        )
        self._notice(f"from step {step} on, frozen: {what}")

    def _match(self, pattern: str) -> list[nn.Parameter]:
        matched = [p for name, p in self._named if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not matched:
            names = ", ".join(name for name, _ in self._named[:4]) + ", …" * (len(self._named) > 4)
            raise TaskError(
                f"frozen() returned {pattern!r}, and no parameter or module has such a name. The parameters are {names}"
            )
        return matched
