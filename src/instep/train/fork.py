"""A run that continues from another run's checkpoint with other hyper-parameters.

[Note: Forked runs]
Population-based training copies the checkpoint of a good trial and continues it with other values of some fields of the
Task. The recipe of a run directory never changes, so the copy is a run directory of its own. Its first checkpoint is
the copied one, with one more part, `fork`, which has the earlier values of those fields; what the run saves itself does
not have it.

Weights, optimizer state, step, data order and generators continue. What depends on the fields is built anew by the
Task: the model (dropout), the loss, the data. The settings of the optimizer and its schedule are in the checkpoint,
though, mixed with what the schedule has made of them. So optimizer and schedule are built twice, with the earlier and
with the new values. Where both have the same setting, the saved one holds. Where they differ, a saved
setting that is still as it was built is replaced by the new one, and one that has changed since is scaled: a learning
rate that cosine has brought down to a tenth of its first value is a tenth of the new first value.

Ranks: all, alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.manifest import FORK
from instep.core.spec import TrainSpec
from instep.train.lr_schedule import LrSchedule, MakeScheduler, schedule_of
from instep.train.task import Task, field_names, overrides

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Built(NamedTuple):
    """The settings of an optimizer and its schedule before the first step."""

    groups: list[dict[str, Any]]
    """Of the optimizer, without the parameters."""
    schedule: dict[str, Any]


class Fork(NamedTuple):
    """What makes the optimizer and its schedule, where the checkpoint comes from."""

    make_optimizer: MakeOptimizer
    make_scheduler: MakeScheduler | None

    @classmethod
    def of(cls, task: Task, origin: Mapping[str, Any]) -> Fork:
        """Return the fork of a Task's run from one in which these fields had other values."""
        fields = {name: getattr(task, name) for name in field_names(type(task))}
        earlier = type(task)(**fields | {name: value for name, value in origin.items() if name in fields})
        return cls(earlier.optimizer, earlier.scheduler if overrides(earlier, "scheduler") else None)

    @classmethod
    def found_in(cls, checkpoint: Checkpoint | None, fork_of: ForkOf | None, spec: TrainSpec) -> Fork | None:
        """Return the fork that a checkpoint begins, with the schedule that the spec asks for; None: it begins none."""
        if checkpoint is None or fork_of is None or FORK not in checkpoint.parts:
            return None
        fork = fork_of(checkpoint.part(FORK))
        return fork._replace(make_scheduler=schedule_of(spec, fork.make_scheduler))


ForkOf = Callable[[Mapping[str, Any]], Fork]
"""Returns the fork from a run in which fields of the Task had these values."""


def build(makers: Fork, parameters: Any, num_steps: int | None) -> Built:
    """Build an optimizer, and its schedule once its length is known, and return their settings."""
    optimizer, schedule = makers.make_optimizer(parameters), dict[str, Any]()
    if makers.make_scheduler is not None and num_steps is not None:
        made = LrSchedule.of(makers.make_scheduler(optimizer, num_steps))
        schedule = {} if made is None else dict(made.scheduler.state_dict())
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return Built(copy.deepcopy(groups), schedule)


def rebase(saved: Any, earlier: Any, new: Any) -> Any:
    """Return saved settings with the difference between earlier and new ones, as they were built, applied to them."""
    if isinstance(saved, Mapping) and isinstance(earlier, Mapping) and isinstance(new, Mapping):
        both = earlier.keys() & new.keys()
        return {key: rebase(value, earlier[key], new[key]) if key in both else value for key, value in saved.items()}
    if all(isinstance(tree, list | tuple) for tree in (saved, earlier, new)) and len(saved) == len(earlier) == len(new):
        return type(saved)(map(rebase, saved, earlier, new))
    if _same(earlier, new):
        return saved
    if _same(saved, earlier) or not _is_number(saved) or not _is_number(earlier) or not earlier:
        return new
    return saved * (new / earlier)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other) if type(one) is type(other) or (_is_number(one) and _is_number(other)) else one is other


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_scalar or (isinstance(value, int | float) and not isinstance(value, bool))
