"""Look at the user's variables now and then: after some optimizer steps, after evaluations, and at the end.

Ranks: all, at the same steps.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from instep.check.observe.attempt import attempt
from instep.check.observe.live_values import LiveValues
from instep.check.observe.log import ObservationLog
from instep.check.observe.observer import Observer
from instep.check.records.live_state import LiveState

_STEPS = frozenset((1, 2, 3, 8, 21, 34, 89, 144, 233))
_MOST_EVALUATIONS = 4
_SLOW_S = 0.2
"""After a look that took longer, only two more follow."""


class LiveStateObserver(Observer):
    """Writes down what the variables of the user's functions hold."""

    def __init__(self, log: ObservationLog) -> None:
        super().__init__(log)
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """By optimizer; the first one's count."""
        self._has_evaluated = False
        self._numbers: dict[str, int] = {}
        self._left = 64
        """Looks that may still be taken."""

    def install(self) -> None:
        """Put the hooks in place."""
        register_optimizer_step_post_hook(self._stepped)
        self.wrap(dataloader._BaseDataLoaderIter, "__next__", self._read)
        self.wrap(torch.nn.Module, "eval", self._evaluates)
        if dist.is_available():
            for owner in (dist.distributed_c10d, dist):
                self.wrap(owner, "destroy_process_group", self._leaves)

    def _read(self, read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._has_evaluated |= not torch.is_grad_enabled() and bool(self._steps)
        return read(*args, **kwargs)

    def _evaluates(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._has_evaluated |= bool(self._steps)
        return evaluate(*args, **kwargs)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.log.is_quiet:
            return
        number = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if optimizer is not next(iter(self._steps)):
            return
        if number in _STEPS:  # whether or not this rank has evaluated: then all ranks look
            self._look("step", sys._getframe(1))
        if self._has_evaluated and self._numbers.get("evaluated", 0) < _MOST_EVALUATIONS:
            self._look("evaluated", sys._getframe(1))
        self._has_evaluated = False

    def _leaves(self, leave: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._numbers.get("left"):
            self._look("left", sys._getframe(1))
        return leave(*args, **kwargs)

    def _look(self, moment: str, frame: FrameType | None) -> None:
        number = self._numbers[moment] = self._numbers.get(moment, 0) + 1
        if not self._left:
            return
        self._left -= 1
        began_s = time.perf_counter()
        optimizers = list(self._steps)
        trained = {id(value) for one in optimizers for group in one.param_groups for value in group["params"]}
        values = LiveValues(self.log.script, trained)
        with self.log.unobserved(), torch.no_grad():
            while frame is not None:
                if self.log.is_users(frame):
                    attempt(lambda taken=frame: values.add_frame(taken))  # type: ignore[misc]
                frame = frame.f_back
            for index, optimizer in enumerate(optimizers):
                attempt(lambda number=index, one=optimizer: values.add_optimizer(number, one))  # type: ignore[misc]
        self.log.write_at(
            ("", 0),
            LiveState,
            moment=moment,
            number=number,
            numbers=values.numbers,
            tensors=values.tensors,
            buffers=values.buffers,
            weights=values.weights,
            generators=values.generators,
            ids=values.ids,
            orders=values.orders,
            layers=values.layers,
            settings=values.settings,
        )
        if time.perf_counter() - began_s > _SLOW_S:
            self._left = min(self._left, 2)
