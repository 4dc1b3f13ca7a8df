"""map(): the samples of a function, each with randomness of its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from instep.data import BatchDataset
from instep.data.batch_plan import BatchSpec
from instep.data.kinds import first_rows, open_loader
from instep.data.loader import LoadOptions

N = 40


class Numbers(BatchDataset):
    block_sizes = np.array([10, 0, 25, 5])

    def __len__(self) -> int:
        return N

    def gather(self, indices: torch.Tensor) -> Any:
        return {"x": indices.double(), "name": [f"n{index}" for index in indices.tolist()]}

    def rows(self, indices: torch.Tensor, begin_row: Any = None) -> list[Any]:
        return [{"x": index.double(), "name": f"n{index}"} for index in indices]


def jitter(sample: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    return sample | {"noise": torch.rand((), generator=generator)}


def scale(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"factor": torch.tensor(random.random() + np.random.rand()) + torch.rand(())}


def global_batches(dataset: Any, world_size: int, first: int = 0, workers: int = 0) -> list[dict[str, list[Any]]]:
    loaders = [
        open_loader(
            dataset,
            BatchSpec(seed=5, batch_size=8),
            LoadOptions(seed=5, rank=rank, world_size=world_size, workers=workers),
        )
        for rank in range(world_size)
    ]
    by_rank = [list(loader.steps(first, 10)) for loader in loaders]
    for loader in loaders:
        loader.source.close()
    return [
        {
            key: [value for step in steps for part in step.parts for value in list(part.batch[key])]
            for key in steps[0].parts[0].batch
        }
        for steps in zip(*by_rank, strict=True)
    ]


@pytest.mark.parametrize(
    "dataset",
    [
        Numbers().map(jitter),
        Numbers().map(jitter).map(scale),
        Numbers()[3:35].map(scale).map(jitter),
        Subset(Subset(Numbers().map(jitter), range(39)), range(0, 39, 2)),
    ],
)
def test_noise_belongs_to_the_sample(dataset: BatchDataset) -> None:
    alone = global_batches(dataset, 1)
    assert global_batches(dataset, 2) == alone
    assert global_batches(dataset, 4, first=3) == alone[3:]
    assert global_batches(dataset, 2, workers=2) == alone
    assert len({float(value) for batch in alone for value in batch["noise" if "noise" in batch else "factor"]}) > N / 2


def test_each_sample_is_mapped_once_an_epoch() -> None:
    alone = global_batches(Numbers().map(lambda sample: {"y": sample["x"] * 2}), 1)
    assert sorted(float(y) for batch in alone[:5] for y in batch["y"]) == [2.0 * i for i in range(N)]


def test_the_blocks_of_a_slice() -> None:
    assert Numbers()[3:35].map(scale).block_sizes.tolist() == [7, 0, 25, 0]


def test_an_error_names_the_sample() -> None:
    def fail(sample: dict[str, Any]) -> Any:
        raise ValueError(sample["name"])

    with pytest.raises(ValueError, match="n0") as raised:
        first_rows(Numbers().map(fail), 2, None, 0)
    assert "map() for sample 0" in raised.value.__notes__[0]
