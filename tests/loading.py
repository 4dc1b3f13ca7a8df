"""Loaders as the tests of data make them, and the plainest dataset."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from instep.data.batch_plan import BatchPlan
from instep.data.loader import GlobalBatch, LoadOptions, TrainLoader, num_samples
from instep.data.order import SampleOrder

CPU = torch.device("cpu")
N = 23


def load(
    dataset: Any,
    first: int = 0,
    last: int = 6,
    *,
    batch_size: int = 5,
    accumulate: int = 1,
    world_size: int = 1,
    rank: int = 0,
    **more: Any,
) -> list[GlobalBatch]:
    loader = make(dataset, batch_size=batch_size, accumulate=accumulate, world_size=world_size, rank=rank, **more)
    try:
        return list(loader.steps(first, last))
    finally:
        loader.source.close()


def make(
    dataset: Any, *, batch_size: int = 5, accumulate: int = 1, world_size: int = 1, rank: int = 0, **more: Any
) -> TrainLoader:
    total = num_samples(dataset, more.get("collate"))
    plan, order = BatchPlan(total, batch_size, accumulate), SampleOrder(1, total)
    more = {"workers": 0, "seed": 1} | more
    return TrainLoader(dataset, plan, order, LoadOptions(rank=rank, world_size=world_size, device=CPU, **more))


def assert_same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


class Squares(Dataset[Any]):
    """Samples one by one: (i, i²)."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), index * index
