"""The seam for observers: one small class, one registry line for each.

An observer hooks into one part of torch. To add one, write a module with a subclass of `Observer`, add its line to
`OBSERVERS` in `check/watched.py`, and the kinds of its observations to `check/records`.

Ranks: all.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from instep.check.observe.log import ObservationLog


class Observer(ABC):
    """Watches one part of torch in this rank. It issues no collectives, draws no random numbers, changes no tensor."""

    def __init__(self, log: ObservationLog) -> None:
        self.log = log

    @abstractmethod
    def install(self) -> None:
        """Put the hooks in place, before the script's first line."""

    def end(self) -> None:  # noqa: B027 - most have nothing to write
        """Write what is known only now; also after a failure. Issues no collectives."""

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace the function `owner.name`: calls become `around(original, *args, **kwargs)` while watched."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.log.is_quiet:  # a compiled function contains no hook
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        setattr(owner, name, call)
