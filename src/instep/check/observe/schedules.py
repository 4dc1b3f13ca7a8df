"""Write down the steps of learning-rate schedules, and how many updates and backward passes came before each.

Ranks: all.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from instep.check.observe.callers import calling_package
from instep.check.observe.object_numbers import ObjectNumbers
from instep.check.observe.observer import Observer
from instep.check.records.schedules import SchedulerStepped


class ScheduleObserver(Observer):
    """Watches the schedulers of `torch.optim.lr_scheduler`, and what is derived from them."""

    def install(self) -> None:
        """Put the hooks in place."""
        self._numbers = ObjectNumbers()
        self._updates: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._backwards = 0
        self._within = threading.local()
        for value in vars(lr_scheduler).values():
            if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and "step" in vars(value):
                self.wrap(value, "step", self._step)
        self.wrap(torch.amp.GradScaler, "step", self._scaled)
        self.wrap(torch.autograd, "backward", self._backward)
        register_optimizer_step_post_hook(self._updated)

    def _step(self, step: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        # One that steps others (SequentialLR), and the step of a constructor, count once or not at all.
        if getattr(self._within, "on", False) or getattr(scheduler, "_is_initial", False):
            return step(scheduler, *args, **kwargs)
        self._within.on = True
        try:
            result = step(scheduler, *args, **kwargs)
        finally:
            self._within.on = False
        self._write(scheduler, args, kwargs)
        return result

    def _write(self, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        metric = None
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            with contextlib.suppress(TypeError, ValueError):  # a metric of another kind is not compared
                metric = float(kwargs["metrics"] if "metrics" in kwargs else args[0])
        horizon = getattr(scheduler, "T_max", None)
        self.log.write(
            SchedulerStepped,
            scheduler=self._numbers.of(scheduler),
            type=type(scheduler).__name__,
            updates=self._updates.get(scheduler.optimizer, 0) if hasattr(scheduler, "optimizer") else 0,
            backwards=self._backwards,
            metric=metric,
            position=int(getattr(scheduler, "last_epoch", 0)),
            horizon=int(horizon) if horizon is not None else None,
            package=calling_package(self.log, sys._getframe(2)),
        )

    def _scaled(self, step: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._updates.get(optimizer, 0)
        result = step(scaler, optimizer, *args, **kwargs)
        self._updates[optimizer] = before + 1
        return result

    def _backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._backwards += 1
        return backward(*args, **kwargs)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling() and not self.log.is_quiet:
            self._updates[optimizer] = self._updates.get(optimizer, 0) + 1
