"""What a Task's loss gives to its model, found without a model.

`loss` and `metrics` call `model(…)` exactly once: a stand-in that notes the arguments and leaves at once sees all
that the model would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from instep.core.errors import TaskError


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model."""

    positional: tuple[Any, ...]
    named: dict[str, Any]

    def to(self, device: torch.device) -> Call:
        """Return the call with its tensors on a device."""
        positional, named = tree_map_only(torch.Tensor, lambda t: t.to(device), (self.positional, self.named))
        return Call(positional, named)


class _Captured(BaseException):
    """Leaves the user's function from the middle; not an Exception, which they may catch."""

    def __init__(self, call: Call) -> None:
        self.call = call


def call_of(function: Callable[[Any, Any], Any], batch: Any) -> Call:
    """Find the arguments with which `function(model, batch)` calls its model."""

    def capture(*positional: Any, **named: Any) -> NoReturn:
        raise _Captured(Call(positional, named))

    try:
        function(capture, batch)
    except _Captured as captured:
        return captured.call
    raise TaskError("loss returned without having called its model; it must do so exactly once.")
