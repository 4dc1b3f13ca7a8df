"""Which field of a Task is the learning rate: the one that sets the optimizer's."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from instep.core.errors import TaskError
from instep.train.task import Task, field_names

_FACTOR = 2
"""By which a field is changed, to see whether the learning rate changes by as much."""


def lr_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of an optimizer's first group; raise TaskError if it has none that can be scaled."""
    lr = optimizer.param_groups[0].get("lr")
    if lr is None or not (math.isfinite(float(lr)) and float(lr) > 0):
        raise TaskError(
            f"{type(optimizer).__name__} has lr={None if lr is None else float(lr)} in its first group of parameters, "
            "and a range test multiplies the learning rate. Give the optimizer one that is more than 0."
        )
    return float(lr)


def find_lr_field(task: Task, make: Callable[[Task, Any], torch.optim.Optimizer], params: Any) -> str | None:
    """Return the field to which the optimizer's learning rate is proportional; None: no field of the Task is.

    `make(task, params)` builds the optimizer. Of several fields, one that is the learning rate itself goes first.
    """
    lr = lr_of(make(task, params))
    fields = [name for name in field_names(type(task)) if _is_proportional(task, name, lr, make, params)]
    return next((name for name in fields if getattr(task, name) == lr), fields[0] if fields else None)


def _is_proportional(
    task: Task, name: str, lr: float, make: Callable[[Task, Any], torch.optim.Optimizer], params: Any
) -> bool:
    value = getattr(task, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return False
    changed = copy.copy(task)
    object.__setattr__(changed, name, value * _FACTOR)  # a Task may be frozen
    # A field that the optimizer refuses twice of (a beta, say) is another one.
    with contextlib.suppress(ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError):
        return math.isclose(lr_of(make(changed, params)), _FACTOR * lr, rel_tol=1e-6)
    return False
