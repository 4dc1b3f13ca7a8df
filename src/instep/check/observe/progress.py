"""Count epochs and notice evaluations: what has to be seen before a script may be ended.

The loader that feeds the training is the one whose batch came last before an optimizer step. An evaluation is a batch
that was read without gradients, or a module that was put into eval mode after the first step.

Ranks: all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, dataloader

from instep.check.observe.ending import Ending
from instep.check.observe.log import ObservationLog
from instep.check.observe.observer import Observer
from instep.check.records.run import EvaluationBegan, TrainingEpochBegan


class ProgressObserver(Observer):
    """Tells the ending what was seen of the script."""

    def __init__(self, log: ObservationLog, ending: Ending) -> None:
        super().__init__(log)
        self._ending = ending
        self._begun: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()
        """How often each loader has begun."""
        self._loaders: weakref.WeakKeyDictionary[Any, weakref.ref[DataLoader[Any]]] = weakref.WeakKeyDictionary()
        """The loader of each iterator."""
        self._last: weakref.ref[DataLoader[Any]] | None = None
        """The loader that gave the last batch."""

    def install(self) -> None:
        """Put the hooks in place."""
        self.wrap(DataLoader, "__iter__", self._begin)
        self.wrap(dataloader._BaseDataLoaderIter, "__next__", self._read)
        self.wrap(torch.nn.Module, "eval", self._evaluate)
        register_optimizer_step_pre_hook(self._step)

    def _begin(self, original: Callable[..., Iterator[Any]], loader: DataLoader[Any]) -> Iterator[Any]:
        iterator = original(loader)
        self._begun[loader] = self._begun.get(loader, 0) + 1
        self._loaders[iterator] = weakref.ref(loader)
        return iterator

    def _read(self, original: Callable[..., Any], iterator: Any) -> Any:
        batch = original(iterator)
        if torch.is_grad_enabled():
            self._last = self._loaders.get(iterator)
        else:
            self._note_evaluation()
        return batch

    def _evaluate(self, original: Callable[..., Any], module: torch.nn.Module) -> Any:
        self._note_evaluation()
        return original(module)

    def _note_evaluation(self) -> None:
        if self.log.step and not self._ending.evaluated:
            self._ending.evaluated = True
            self.log.write(EvaluationBegan, frame_depth=3)

    def _step(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.log.is_quiet:
            return
        loader = self._last() if self._last is not None else None
        epochs = self._begun.get(loader, 0) if loader is not None else 0
        if epochs > self._ending.epochs:
            self._ending.epochs = epochs
            self.log.write(TrainingEpochBegan, frame_depth=2, epoch=epochs)
