"""The steps of an optimizer as a rank made them: what happened between one and the next. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from instep.check.observations import Observed
from instep.check.records.gradients import GradientEvent, ModelWrapped, StepTaken
from instep.check.records.replicas import Joined

E = TypeVar("E", bound=GradientEvent)


@dataclass(frozen=True)
class TrainingStep:
    """A step of an optimizer, with all that happened since its previous one, in the order of time."""

    taken: StepTaken
    events: tuple[GradientEvent, ...]

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def place(self) -> tuple[str, int]:
        """Where `optimizer.step` was called."""
        return self.taken.file, self.taken.line


def events_of(observed: Observed, rank: int) -> list[GradientEvent]:
    """Return everything that happened to gradients on a rank, in the order of time."""
    events = [event for kind in _kinds(GradientEvent) for event in observed.by_rank(kind)[rank]]
    return sorted(events, key=lambda event: event.order)


def _kinds(kind: type[GradientEvent]) -> Iterator[type[GradientEvent]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)


def steps_of(observed: Observed, rank: int) -> dict[int, list[TrainingStep]]:
    """Return the steps of each optimizer on a rank."""
    steps: dict[int, list[TrainingStep]] = {}
    since: dict[int, int] = {}
    events = events_of(observed, rank)
    for index, event in enumerate(events):
        if isinstance(event, StepTaken):
            between = tuple(events[since.get(event.optimizer, 0) : index])
            steps.setdefault(event.optimizer, []).append(TrainingStep(event, between))
            since[event.optimizer] = index + 1
    return steps


def steps_together(observed: Observed) -> Iterator[list[TrainingStep]]:
    """Yield each step that all ranks have made, as rank 0, 1, … made it, of optimizers that are alike on them.

    None where `Join` was used: a rank with fewer batches is at another epoch's step.
    """
    if observed.has(Joined):
        return
    by_rank = [steps_of(observed, rank) for rank in range(observed.world_size)]
    for optimizer in by_rank[0] if by_rank else ():
        steps = [of_rank.get(optimizer, []) for of_rank in by_rank]
        # An optimizer may hold other parameters on each rank: ZeroRedundancyOptimizer, stages of a pipeline.
        if len({tuple(of_rank[0].taken.names) if of_rank else None for of_rank in steps}) == 1:
            yield from (list(step) for step in zip(*steps, strict=False))


def wrappers_of(observed: Observed) -> dict[int, ModelWrapped]:
    """Return the wrapped models, by their numbers, as rank 0 has them."""
    return {wrapped.wrapper: wrapped for wrapped in observed.by_rank(ModelWrapped)[0]} if observed.world_size else {}
