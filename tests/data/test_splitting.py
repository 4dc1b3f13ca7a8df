"""Splits and folds: nothing in two parts, classes in proportion, groups whole, the same every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from instep import data
from instep.data.dataset import BatchDataset
from instep.data.ordered import blocks_of

fractions = st.floats(0.15, 0.85)
labels = st.lists(st.integers(0, 3), min_size=12, max_size=80)


def numbers(part: Any) -> list[int]:
    return [int(part[row]) for row in range(len(part))]


@settings(deadline=None)
@given(st.integers(4, 300), fractions, st.integers(0, 3))
def test_two_parts(size: int, fraction: float, seed: int) -> None:
    first, second = (numbers(part) for part in data.split(torch.arange(size), fraction, seed=seed))
    assert sorted(first + second) == list(range(size))
    assert len(first) == int(np.floor(fraction * size + 0.5))
    assert first == sorted(first)
    assert second == sorted(second)


@settings(deadline=None)
@given(labels, fractions)
def test_stratified(classes: list[int], fraction: float) -> None:
    first, second = (numbers(part) for part in data.split(torch.arange(len(classes)), fraction, by=classes))
    assert sorted(first + second) == list(range(len(classes)))
    assert len(first) == int(np.floor(fraction * len(classes) + 0.5))
    for label in set(classes):
        own = sum(classes[sample] == label for sample in first)
        assert abs(own - fraction * classes.count(label)) < 1 + 1e-9


def test_a_share_that_is_a_whole_number_is_exact() -> None:
    classes = np.repeat([0, 1, 2], [100, 10, 40])
    first, _ = data.split({"x": torch.arange(150), "label": torch.from_numpy(classes)}, 0.9, by="label")
    assert torch.bincount(first.gather(torch.arange(len(first)))["label"]).tolist() == [90, 9, 36]


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=30, max_size=120).filter(lambda g: len(set(g)) > 8), st.booleans())
def test_groups_stay_whole(groups: list[int], stratified: bool) -> None:
    by = [group % 2 for group in groups] if stratified else None
    first, second = (numbers(part) for part in data.split(torch.arange(len(groups)), 0.6, by=by, groups=groups))
    assert not {groups[sample] for sample in first} & {groups[sample] for sample in second}
    assert sorted(first + second) == list(range(len(groups)))
    largest = max(groups.count(group) for group in groups)
    assert abs(len(first) - 0.6 * len(groups)) <= largest / 2 * (2 if stratified else 1) + 1e-9


@settings(deadline=None)
@given(labels, st.integers(2, 5), st.sampled_from(["plain", "by", "groups", "both"]))
def test_folds(classes: list[int], k: int, kind: str) -> None:
    size = len(classes)
    groups = [sample // 2 for sample in range(size)]
    options = {
        "by": classes if kind in ("by", "both") else None,
        "groups": groups if kind in ("groups", "both") else None,
    }
    pairs = data.folds(torch.arange(size), k, **options)
    tests = [numbers(test) for _, test in pairs]
    assert sorted(sample for test in tests for sample in test) == list(range(size))
    assert all(
        sorted(numbers(train) + test) == list(range(size)) for (train, _), test in zip(pairs, tests, strict=True)
    )
    if kind in ("plain", "by"):
        assert max(map(len, tests)) - min(map(len, tests)) <= 1
    if kind == "by":
        for label in set(classes):
            counts = [sum(classes[sample] == label for sample in test) for test in tests]
            assert max(counts) - min(counts) <= 1
    if kind in ("groups", "both"):
        assert all({sample ^ 1 for sample in test if sample ^ 1 < size} <= set(test) for test in tests)


def test_the_same_every_time_and_another_with_another_seed() -> None:
    splits = [numbers(data.split(torch.arange(100), 0.5, seed=seed)[0]) for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]
    assert numbers(data.split(torch.arange(20), 0.5)[1]) == [0, 1, 4, 5, 7, 10, 11, 14, 15, 17]


class Blocks(BatchDataset):
    block_sizes = np.full(10, 10)

    def __len__(self) -> int:
        return 100

    def gather(self, indices: torch.Tensor) -> Any:
        return indices


class Plain(Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    "dataset", [Blocks(), Plain(), torch.arange(100), np.arange(100)], ids=lambda d: type(d).__name__
)
def test_of_any_dataset(dataset: Any) -> None:
    first, second = data.split(dataset, 0.7)
    assert sorted(numbers(first) + numbers(second)) == list(range(100))
    again, _ = data.split(first, 0.5)  # parts can be split again
    assert set(numbers(again)) < set(numbers(first))
    sizes = blocks_of(first)
    assert (sizes is not None) == isinstance(dataset, Blocks)
    if sizes is not None:
        assert sizes.tolist() == np.bincount(np.array(numbers(first)) // 10, minlength=10).tolist()
        assert isinstance(first.map(lambda sample: sample + 1), BatchDataset)
