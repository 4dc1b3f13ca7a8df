"""Write down what DataLoaders yield: the samples of each batch, and whether it is trained on.

Ranks: all. Indices are taken where the loader draws them from its sampler, rows where the loader yields them; with
workers the two are some batches apart, so indices wait in a queue.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from instep.check.observe.attempt import attempt
from instep.check.observe.datasets import Content, content_of, members_of, root_content, root_index
from instep.check.observe.log import ObservationLog
from instep.check.observe.names import PlaceNames
from instep.check.observe.observer import Observer
from instep.check.observe.rows import hash_rows
from instep.check.observe.samplers import length_of, sampler_facts, samplers_of
from instep.check.records.data import (
    BatchYielded,
    EpochSeen,
    EvaluationSeen,
    LoaderMade,
    LoadersEnded,
    PassBegan,
    PassEnded,
    SecondEpochSeen,
)

_REDUCTIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter_tensor",
    "all_to_all",
    "send",
    "isend",
)
"""Collectives that can bring the metrics of several ranks together."""


@dataclass(eq=False)
class _Pass:
    """An iteration over a loader that goes on."""

    loader: str
    number: int
    dataset: Any
    expected: int
    """Batches that the loader says it has; -1: it does not say."""
    drawn: collections.deque[Any] = field(default_factory=collections.deque)
    num_batches: int = 0
    backwards: int = 0
    num_evaluating: int = 0

    @property
    def is_training(self) -> bool:
        return self.backwards > 0 and self.num_evaluating * 2 <= self.num_batches


class LoaderObserver(Observer):
    """Watches every DataLoader of torch, also those that frameworks make from the user's."""

    def __init__(self, log: ObservationLog) -> None:
        super().__init__(log)
        self._names = PlaceNames(log)
        self._loaders: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._numbers: collections.Counter[str] = collections.Counter()
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._contents: dict[int, tuple[weakref.ref[Any], Content, str]] = {}
        self._open: dict[_Pass, None] = {}
        self._pending: set[_Pass] = set()
        """Passes that yielded a batch to train on since the last backward pass."""
        self._is_eval_mode = False
        self._trained: set[str] = set()
        self._reductions = 0

    def install(self) -> None:
        """Put the hooks in place."""
        self.wrap(DataLoader, "__init__", self._made)
        self.wrap(_BaseDataLoaderIter, "__init__", self._began)
        self.wrap(_BaseDataLoaderIter, "_reset", self._reset)
        self.wrap(_BaseDataLoaderIter, "_next_index", self._drawn)
        self.wrap(_BaseDataLoaderIter, "__next__", self._next)
        self.wrap(torch.autograd, "backward", self._backward)
        self.wrap(torch.nn.Module, "train", self._mode)
        for name in _REDUCTIONS:
            self.wrap(torch.distributed, name, self._reduced)

    def end(self) -> None:
        """Write down the passes that go on."""
        for progress in list(self._open):
            self._write_end(progress, is_exhausted=False)
        self.log.write(LoadersEnded, reductions=self._reductions)

    def _made(self, original: Any, loader: DataLoader[Any], /, *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        self._name(loader)

    def _name(self, loader: DataLoader[Any]) -> str:
        """Return the loader's name; write the loader down when it gets one."""
        if loader not in self._loaders:
            self._loaders[loader] = self._names.next_here()
            if (facts := attempt(lambda: sampler_facts(loader))) is not None:
                self.log.write(
                    LoaderMade,
                    loader=self._loaders[loader],
                    dataset=type(loader.dataset).__name__,
                    length=length_of(loader.dataset),
                    is_iterable=isinstance(loader.dataset, IterableDataset),
                    batch_size=loader.batch_size if isinstance(loader.batch_size, int) else 0,
                    num_workers=loader.num_workers,
                    **facts,
                )
        return self._loaders[loader]

    def _began(self, original: Any, iterator: Any, loader: DataLoader[Any], /, *args: Any, **kwargs: Any) -> None:
        self._begin(iterator, loader)  # before the sampler is asked for its first index
        original(iterator, loader, *args, **kwargs)

    def _reset(self, original: Any, iterator: Any, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if not first_iter:  # persistent workers start another pass
            self._begin(iterator, loader)
        elif iterator in self._passes:
            self._passes[iterator].drawn.clear()
        original(iterator, loader, first_iter)

    def _begin(self, iterator: Any, loader: DataLoader[Any]) -> None:
        name = self._name(loader)
        number = self._numbers[name]
        self._numbers[name] += 1
        expected = -1 if isinstance(loader.dataset, IterableDataset) else length_of(loader)
        progress = self._passes[iterator] = _Pass(name, number, loader.dataset, expected)
        self._open[progress] = None
        # A batch of an earlier pass that nobody trained on so far was only looked at: `next(iter(loader))`.
        self._pending = {other for other in self._pending if other.loader != name}
        epochs = [sampler.epoch for sampler in samplers_of(loader) if isinstance(getattr(sampler, "epoch", None), int)]
        with self.log.unobserved():
            content, root = attempt(lambda: self._digests(loader.dataset)) or (Content("", ""), "")
            members = attempt(lambda: members_of(loader.dataset, loader.sampler)) or []
        self.log.write(
            PassBegan,
            loader=name,
            number=number,
            num_batches=expected,
            content=content.in_order,
            sorted_content=content.any_order,
            root=root,
            members=members if number == 0 else [],
            sampler_epoch=epochs[0] if epochs else -1,
            reductions=self._reductions,
        )
        if number > 0 and name in self._trained:
            self.log.write(SecondEpochSeen)

    def _digests(self, dataset: Any) -> tuple[Content, str]:
        """Return the digests of a dataset and of its root; each dataset is read once."""
        known = self._contents.get(id(dataset))
        if known is not None and known[0]() is dataset:
            return known[1:]
        digests = content_of(dataset), root_content(dataset)
        with contextlib.suppress(TypeError):  # a list has no weak references; it is read again
            self._contents[id(dataset)] = weakref.ref(dataset), *digests
        return digests

    def _drawn(self, original: Any, iterator: Any) -> Any:
        index = original(iterator)
        if iterator in self._passes:
            self._passes[iterator].drawn.append(index)
        return index

    def _next(self, original: Any, iterator: Any) -> Any:
        progress = self._passes.get(iterator)
        try:
            batch = original(iterator)
        except StopIteration:
            if progress in self._open:
                self._write_end(progress, is_exhausted=True)
            raise
        if progress is not None:
            with self.log.unobserved():
                indices = attempt(lambda: _indices(progress)) or []
                rows = attempt(lambda: hash_rows(batch, len(indices))) or []
            self._yielded(progress, indices, rows)
        return batch

    def _yielded(self, progress: _Pass, indices: list[int], rows: list[int]) -> None:
        is_evaluating = not torch.is_grad_enabled() or self._is_eval_mode
        self.log.write(
            BatchYielded,
            loader=progress.loader,
            number=progress.number,
            batch=progress.num_batches,
            indices=indices,
            rows=rows,
            is_evaluating=is_evaluating,
            backwards=progress.backwards,
            reductions=self._reductions,
        )
        progress.num_batches += 1
        progress.num_evaluating += is_evaluating
        if not is_evaluating:
            self._pending.add(progress)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_eval_mode = False  # that of a teacher, or one that a framework left without calling train()
        for progress in self._pending:
            progress.backwards += 1
            self._trained.add(progress.loader)
        self._pending.clear()
        return original(*args, **kwargs)

    def _mode(self, original: Any, module: torch.nn.Module, mode: bool = True) -> Any:
        self._is_eval_mode = not mode
        return original(module, mode)

    def _reduced(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._reductions += 1
        return original(*args, **kwargs)

    def _write_end(self, progress: _Pass, *, is_exhausted: bool) -> None:
        self._open.pop(progress, None)
        self._pending.discard(progress)
        self.log.write(
            PassEnded,
            loader=progress.loader,
            number=progress.number,
            is_exhausted=is_exhausted,
            backwards=progress.backwards,
            reductions=self._reductions,
        )
        if progress.num_batches and (is_exhausted or progress.num_batches == progress.expected):
            if progress.is_training:
                self.log.write(EpochSeen)
            elif progress.num_evaluating and not progress.backwards:
                self.log.write(EvaluationSeen)


def _indices(progress: _Pass) -> list[int]:
    """Return the root's indices of the batch that was yielded; empty: a stream has none."""
    if not progress.drawn:
        return []
    drawn = progress.drawn.popleft()
    drawn = drawn.tolist() if hasattr(drawn, "tolist") else drawn
    batch = drawn if isinstance(drawn, list | tuple) else [drawn]
    if any(index is None for index in batch):
        return []
    return [root_index(progress.dataset, index) for index in batch]
