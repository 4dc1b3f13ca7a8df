"""Streams whose elements are numbers, and how tests read them: on several ranks, from any step on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from instep.data.batch_plan import BatchSpec
from instep.data.kinds import open_loader
from instep.data.loader import GlobalBatch, Loader, LoadOptions


class Numbers(IterableDataset[Any]):
    """0, 1, 2, …, each with a number drawn from every global generator; another noise and no end in every epoch."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.count):
            yield 1000 * self.epoch + i, torch.rand(1), random.random(), np.random.rand()


class Sized(Numbers):
    def __init__(self, count: int, length: int | None = None) -> None:
        super().__init__(count)
        self.length = count if length is None else length

    def __len__(self) -> int:
        return self.length


class Stateful(Numbers):
    """Has a position of its own, in itself as such datasets have it; counts the elements that all copies gave."""

    given = 0

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.position, self.count):
            self.position = i + 1
            Stateful.given += 1
            yield 1000 * self.epoch + i, torch.rand(1), random.random(), np.random.rand()
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Shuffled(Stateful):
    """Its shuffle buffer is not part of its state, as in `datasets`."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for element in super().__iter__():
            if len(buffer) < 4:
                buffer.append(element)
            else:
                place = random.randrange(4)
                yield buffer[place]
                buffer[place] = element
        yield from buffer


STREAMS: list[Callable[[int], Numbers]] = [Numbers, Sized, Stateful, Shuffled]


def open_(dataset: Any, rank: int = 0, world_size: int = 1, **more: Any) -> Loader:
    names = {"batch_size", "drop_last", "shards"} & more.keys()
    given = {"batch_size": 5, **{name: more.pop(name) for name in names}}
    options = LoadOptions(rank=rank, world_size=world_size, **{"workers": 0, "seed": 3, **more})
    return open_loader(dataset, BatchSpec(seed=options.seed, **given), options)


def load(loader: Loader, first: int, last: int) -> list[GlobalBatch]:
    try:
        return list(loader.steps(first, last))
    finally:
        loader.source.close()


def rows_of(ranks: list[list[GlobalBatch]]) -> list[Any]:
    """Return the global batches, put together from the ranks' parts: the elements of each, and whether it is last."""
    batches = []
    for step in zip(*ranks, strict=True):
        parts = sorted((part for batch in step for part in batch.parts if part.plan.counted), key=lambda p: p.plan[0])
        columns = zip(*(part.batch for part in parts), strict=True)
        assert [part.plan.first_row for part in parts] == [
            sum(p.plan.num_rows for p in parts[:i]) for i in range(len(parts))
        ]
        rows = [torch.cat(list(column)).flatten().tolist() for column in columns]
        assert len({(batch.epoch, batch.size, batch.ends_epoch) for batch in step}) == 1
        batches.append((step[0].epoch, step[0].ends_epoch, rows))
    return batches


def read(make: Callable[[], Any], first: int, last: int, world_size: int = 1, **more: Any) -> list[Any]:
    return rows_of([load(open_(make(), rank, world_size, **more), first, last) for rank in range(world_size)])
