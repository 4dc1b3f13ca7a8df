"""Ranks that fit together get the bits of one process, and the same error if one of them finds something wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import instep
from instep.core.errors import DataError
from instep.data import ImageNormalizer, MinMaxScaler, RobustScaler, StandardScaler, Vocabulary
from instep.data.statistics.ranks import FitRanks, accumulate, fitting_together
from instep.data.statistics.stored import to_plain
from instep.train.preprocessing import fitting_with
from instep.world.world import World
from nasty import NASTY, Stream
from ranks import run_ranks

TEXTS = [f"w{i % 7} w{i % 5} w{i * i % 11}" for i in range(50)]


def fit_all() -> Any:
    """Fit everything to everything."""
    images = np.random.default_rng(0).integers(0, 256, (30, 3, 6, 5), dtype=np.uint8)
    fitted: dict[str, Any] = {"images": ImageNormalizer().fit(images), "words": Vocabulary(min_count=2).fit(TEXTS)}
    for name, data in NASTY.items():
        for cls in (StandardScaler, MinMaxScaler, RobustScaler):
            fitted[f"{name}, {cls.__name__}"] = cls().fit(data)
    fitted["dataset"] = StandardScaler().fit(instep.data.digits("train"), column=0)
    fitted["stream"] = StandardScaler().fit(Stream(torch.randn(3000, 2, generator=torch.Generator().manual_seed(0))))
    fitted["quantiles"] = instep.data.quantiles(NASTY["normal"], [0.1, 0.7])
    return repr(to_plain(fitted))  # NaN is not equal to itself


def fit_on_rank(world: World) -> Any:
    with fitting_with(world):
        return fit_all()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_same_bits_on_any_number_of_processes(world_size: int) -> None:
    assert set(run_ranks(fit_on_rank, world_size)) == {fit_all()}


def test_each_rank_reads_its_part_once() -> None:
    for size in (1, 5, 17):
        for world_size in (1, 2, 3, 7):
            parts = [FitRanks(rank, world_size).part(size) for rank in range(world_size)]
            assert [index for part in parts for index in part] == list(range(size))


class Counting(torch.utils.data.Dataset[Any]):
    """Notes which samples were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor([float(index)])


def test_work_is_shared() -> None:
    """Without this, ranks that each read everything would give the same bits, too."""
    dataset = Counting()
    with fitting_together(FitRanks(1, 3, lambda own: [own] * 3)):
        StandardScaler().fit(dataset)
    assert sorted(dataset.read) == list(range(1000, 2000))


def test_it_ends_with_the_block() -> None:
    with fitting_together(FitRanks(0, 2, lambda own: [own, own])):
        assert StandardScaler().fit(np.zeros((10, 1))).n_samples_seen_ == 10
        assert StandardScaler().partial_fit(np.zeros((10, 1))).n_samples_seen_ == 10  # a batch is this process's own
    assert accumulate.__module__ == "instep.data.statistics.ranks"
    assert MinMaxScaler().fit(np.zeros((10, 1))).n_samples_seen_ == 10


def fit_with_a_problem(world: World, what: str) -> str:
    data = np.ones((8, 2 + (what == "columns" and world.rank)))
    if what == "infinity":
        data[7, 1] = np.inf  # in the last rank's part
    if what == "length" and world.rank == 1:
        data = data[:5]
    with fitting_with(world), pytest.raises(DataError) as caught:
        StandardScaler().fit(data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("infinity", "Column 1 of the data has an infinity"),
        ("length", "5 samples on rank 1 and 8 on rank 0"),
        ("columns", "has 3 columns, and there were 2 before"),
    ],
)
def test_all_ranks_raise_what_one_finds(what: str, message: str) -> None:
    answers = run_ranks(fit_with_a_problem, 2, what)
    assert len(set(answers)) == 1
    assert message in answers[0]
