"""The arguments with which a Task's loss calls its model, captured without a model.

`loss` and `metrics` call `model(…)` exactly once. So a stand-in that records the arguments and raises sees all that the
model would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from instep.core.errors import TaskError


class Call(NamedTuple):
    """The arguments of one call of a model."""

    positional: tuple[Any, ...]
    named: dict[str, Any]

    def to(self, device: torch.device) -> Call:
        """Return the call with its tensors on a device."""
        return Call(*tree_map_only(torch.Tensor, lambda t: t.to(device), self))


class _Captured(BaseException):
    """Leaves the user's function from the middle; not an Exception, which the user's code may catch."""


def call_of(function: Callable[[Any, Any], Any], batch: Any) -> Call:
    """Return the arguments with which `function(model, batch)` calls its model."""

    def capture(*positional: Any, **named: Any) -> NoReturn:
        raise _Captured(positional, named)

    try:
        function(capture, batch)
    except _Captured as captured:
        return Call(*captured.args)
    raise TaskError("loss returned without having called its model; it must call it exactly once.")
