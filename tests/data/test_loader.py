"""The loaders: every kind of dataset, the same samples at any world size, randomness by sample."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from instep.core.errors import DataError, TaskError
from instep.data import BatchDataset
from instep.data.loader import GlobalBatch, LoadOptions, evaluation_chunks
from loading import CPU, N, Squares, assert_same, load, make


class Noisy(Squares):
    """Draws from all three generators, as augmentation does."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), random.random(), np.random.rand()


class SamplesAtOnce(Squares):
    """torch's convention: a list of samples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list
        assert type(indices[0]) is int
        return [self[index] for index in indices]


class BatchAtOnce(Squares):
    """Anything but a list is the batch."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"i": torch.tensor(indices)}


class Gathered(BatchDataset):
    def __len__(self) -> int:
        return N

    def gather(self, indices: torch.Tensor) -> Any:
        assert indices.dtype == torch.int64
        return indices, indices**2


# --- every kind of dataset ---------------------------------------------------------------------------------

i = torch.arange(N)
MAPPED = np.arange(N, dtype=np.float32)
MAPPED.flags.writeable = False  # as a memory map opened for reading is


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        pytest.param(i * 3, lambda k: k * 3, id="tensor"),
        pytest.param(np.arange(N) * 3, lambda k: k * 3, id="array"),
        pytest.param(MAPPED, lambda k: k.float(), id="read-only array"),
        pytest.param(np.arange(N, dtype=">i4"), lambda k: k.int(), id="big-endian array"),
        pytest.param(np.arange(N)[::-1], lambda k: N - 1 - k, id="array backwards"),
        pytest.param((i, np.arange(N) * 2), lambda k: (k, k * 2), id="tuple"),
        pytest.param([i, i * 2], lambda k: [k, k * 2], id="list"),
        pytest.param({"a": i, "b": i * 2}, lambda k: {"a": k, "b": k * 2}, id="dict"),
        pytest.param(TensorDataset(i, i * 2), lambda k: (k, k * 2), id="TensorDataset"),
        pytest.param(Gathered(), lambda k: (k, k**2), id="BatchDataset"),
        pytest.param(Squares(), lambda k: [k, k**2], id="samples"),
        pytest.param(SamplesAtOnce(), lambda k: [k, k**2], id="__getitems__, samples"),
        pytest.param(BatchAtOnce(), lambda k: {"i": k}, id="__getitems__, batch"),
        pytest.param([(k, k * 2) for k in range(N)], lambda k: [k, k * 2], id="list of samples"),
        pytest.param(
            [torch.full((2, 3), k) for k in range(N)],
            lambda k: k.view(-1, 1, 1).expand(-1, 2, 3),
            id="images",
        ),
    ],
)
def test_every_kind_of_dataset_is_read(dataset: Any, expected: Any) -> None:
    loader = make(dataset)
    for batch in loader.steps(0, 6):
        assert_same(batch.parts[0].batch, expected(torch.from_numpy(loader.sample_indices(batch.step))))
    assert loader.source.notices == []


@pytest.mark.parametrize("base", [Squares(), SamplesAtOnce(), i, Gathered(), (i, i)], ids=lambda b: type(b).__name__)
def test_a_subset_is_read_as_its_base_is(base: Any) -> None:
    chosen = [3, 1, 20, 7, 9]
    rows = list(load(Subset(base, chosen), 0, 1)[0].parts[0].batch)
    values = rows[0] if isinstance(rows[0], torch.Tensor) and rows[0].dim() else torch.stack(rows)
    assert sorted(values.tolist()) == sorted(chosen)
    assert make(Subset(base, chosen)).source.describe() == make(base).source.describe()


def test_a_memory_map_is_read_where_it_is_needed(tmp_path: Path) -> None:
    np.arange(N * 2, dtype=np.uint16).reshape(N, 2).tofile(tmp_path / "map")
    mapped = np.memmap(tmp_path / "map", dtype=np.uint16, mode="r", shape=(N, 2))
    indices = torch.from_numpy(make(i).sample_indices(2)).to(torch.int32)
    loaded = load(mapped)[2].parts[0].batch
    assert loaded.dtype == torch.uint16
    assert_same(loaded.to(torch.int32), torch.stack([indices * 2, indices * 2 + 1], dim=1))


def test_collate_gets_samples_whatever_the_dataset() -> None:
    def collate(samples: list[Any]) -> Any:
        assert type(samples) is list
        return torch.stack([torch.as_tensor(sample[0]) for sample in samples]) * 10

    for dataset in (Squares(), SamplesAtOnce(), Gathered(), (i, i), [torch.tensor([k, k]) for k in range(N)]):
        loader = make(dataset, collate=collate)
        first = next(loader.steps(0, 1))
        assert_same(first.parts[0].batch, torch.from_numpy(loader.sample_indices(0)) * 10)


def test_how_a_dataset_is_read_is_said() -> None:
    assert make(i).source.describe() == "indexed by the batch, in the training process"
    assert make(i, workers=2).source.describe() == "indexed by the batch, ahead by 2 threads"
    assert make(Squares(), workers=1).source.describe() == "sample by sample, ahead by 1 worker process"
    assert make(BatchAtOnce(), workers=2).source.describe() == "indexed by the batch, ahead by 2 worker processes"
    assert make(Squares(), workers=None).source.describe() == "sample by sample, in the training process"


# --- which samples, and where ------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5), st.integers(1, 7), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_ranks_together_load_what_one_process_loads(
    total: int, batch_size: int, accumulate: int, world_size: int, first: int
) -> None:
    data, cut = torch.arange(total), {"batch_size": batch_size, "accumulate": accumulate}
    by_rank = [load(data, first, first + 4, world_size=world_size, rank=rank, **cut) for rank in range(world_size)]
    for alone, *shared in zip(load(data, first, first + 4, batch_size=batch_size), *by_rank, strict=True):
        loaded: list[list[int]] = [[] for _ in shared[0].parts]
        for batch in shared:
            assert batch[:3] == alone[:3]
            for part, rows in zip(batch.parts, loaded, strict=True):
                assert len(part.batch) == part.plan.num_rows
                rows += part.batch.tolist() if part.plan.counted else []
        assert list(itertools.chain(*loaded)) == alone.parts[0].batch.tolist()


def test_starting_in_the_middle_of_an_epoch_goes_on_as_if_from_the_start() -> None:
    for dataset in (i, Squares()):
        whole = load(dataset, 0, 12)
        for first in (1, 4, 5, 7):
            assert_same(
                [b.parts[0].batch for b in load(dataset, first, 12)],
                [b.parts[0].batch for b in whole[first:]],
            )
    assert load(i, 3, 3) == []


def test_an_epoch_has_every_sample_once_also_beyond_one_lookup() -> None:
    batches = load(torch.arange(30_000), 0, 120, batch_size=500)
    for epoch in (0, 1):
        rows = torch.cat([b.parts[0].batch for b in batches if b.epoch == epoch])
        assert_same(rows.sort().values, torch.arange(30_000))
    assert [b.step for b in batches] == list(range(120))


@given(st.integers(1, 40), st.integers(1, 15), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_an_evaluation_has_every_sample_once_in_chunks_that_stay_the_same(
    total: int, chunk: int, world_size: int
) -> None:
    by_rank = [
        list(evaluation_chunks(torch.arange(total), chunk, LoadOptions(rank=rank, world_size=world_size, seed=0)))
        for rank in range(world_size)
    ]
    chunks = [by_rank[c % world_size][c // world_size] for c in range(-(-total // chunk))]
    assert sum(map(len, by_rank)) == len(chunks)
    assert torch.cat([batch for batch, _ in chunks]).tolist() == list(range(total))
    assert [rows for _, rows in chunks] == [len(batch) for batch, _ in chunks]
    assert all(rows == chunk for _, rows in chunks[:-1])


# --- nested batches ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Sentence:
    words: torch.Tensor
    name: str


def test_nested_batches_arrive_as_they_were_made() -> None:
    def collate(samples: list[Any]) -> Any:
        numbers = torch.tensor([int(sample[0]) for sample in samples])
        return {"pair": Pair(numbers, [numbers * 2]), "sentence": Sentence(numbers * 3, "kept")}

    for workers in (0, 1):
        loader = make(Squares(), collate=collate, workers=workers)
        batch = next(loader.steps(0, 1)).parts[0].batch
        loader.source.close()
        numbers = torch.from_numpy(loader.sample_indices(0))
        assert type(batch["pair"]) is Pair
        assert_same((batch["pair"].x, batch["pair"].y), (numbers, [numbers * 2]))
        assert type(batch["sentence"]) is Sentence
        assert batch["sentence"].name == "kept"
        assert_same(batch["sentence"].words, numbers * 3)


# --- randomness --------------------------------------------------------------------------------------------


def noise_by_sample(batches: list[GlobalBatch]) -> dict[tuple[int, int], tuple[Any, ...]]:
    noise = {}
    for batch in batches:
        for part in batch.parts:
            index, *drawn = part.batch
            for row, number in enumerate(index.tolist()):
                noise[batch.epoch, number] = tuple(str(values[row].tolist()) for values in drawn)
    return noise


def test_a_samples_noise_depends_on_seed_epoch_and_sample_alone() -> None:
    alone = noise_by_sample(load(Noisy(), 0, 10))
    assert len(alone) == 2 * N
    assert len(set(alone.values())) == 2 * N
    assert noise_by_sample(load(Noisy(), 0, 10, workers=2)) == alone
    shared = [load(Noisy(), 0, 10, world_size=3, rank=rank, accumulate=2) for rank in range(3)]
    assert noise_by_sample(list(itertools.chain(*shared))) == alone
    assert not set(noise_by_sample(load(Noisy(), 0, 10, seed=2)).values()) & set(alone.values())


def test_an_evaluations_noise_does_not_depend_on_the_split() -> None:
    def noise(world_size: int, workers: int) -> list[str]:
        common = {"world_size": world_size, "device": CPU, "workers": workers, "seed": 1}
        chunks = [list(evaluation_chunks(Noisy(), 4, LoadOptions(rank=rank, **common))) for rank in range(world_size)]
        return sorted(str(batch) for batch, _ in itertools.chain(*chunks))

    assert noise(1, 0) == noise(3, 0) == noise(1, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_callers_generators_are_left_alone(workers: int) -> None:
    def draw() -> Any:
        return torch.rand(1).item(), random.random(), np.random.rand()

    def seed() -> None:
        torch.manual_seed(3), random.seed(3), np.random.seed(3)

    seed()
    expected = draw()
    seed()
    load(Noisy(), 0, 3, workers=workers)
    list(evaluation_chunks(Noisy(), 4, LoadOptions(workers=workers, seed=0)))
    assert draw() == expected


def test_noise_of_a_whole_batch_is_said_once_and_repeats() -> None:
    class Augmented(Squares):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.tensor(indices) + torch.rand(len(indices))

    loader = make(Augmented())
    before = torch.get_rng_state()
    whole = list(loader.steps(0, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(loader.source.notices) == 1
    assert "draws random numbers while it reads a whole batch" in loader.source.notices[0]
    assert_same([b.parts[0].batch for b in load(Augmented(), 3)], [b.parts[0].batch for b in whole[3:]])


class DrawnAtOnce(Squares):
    """Samples with noise, read by the batch: as `datasets` with set_transform."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(i, torch.rand(2), random.random()) for i in indices]


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(N))], ids=["dataset", "Subset"])
def test_samples_that_are_read_by_the_batch_and_drawn_have_their_own_noise(wrap: Any) -> None:
    loader = make(wrap(DrawnAtOnce()))
    whole = list(loader.steps(0, 5))
    assert "read sample by sample" in loader.source.notices[0]
    for world_size in (2, 3):
        ranks = [load(wrap(DrawnAtOnce()), 0, 5, world_size=world_size, rank=rank) for rank in range(world_size)]
        for step, batch in enumerate(whole):
            parts = [part for own in ranks for part in own[step].parts if part.plan.counted]
            for column, rows in enumerate(batch.parts[0].batch):
                assert_same(torch.cat([part.batch[column] for part in parts]), rows)


# --- what cannot be ----------------------------------------------------------------------------------------


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class WrongRows(Gathered):
    def gather(self, indices: torch.Tensor) -> Any:
        return torch.zeros(7, 3)


class TooFew(Squares):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[indices[0]]]


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (NoLength(), TaskError, "NoLength.*has no length.*__len__"),
        ({"a": [1, 2]}, TaskError, "keys .'a'.*tensors or NumPy"),
        (torch.zeros(0, 3), DataError, "no samples"),
        ([], DataError, "no samples"),
        ((torch.zeros(3), torch.zeros(4)), DataError, "Column 0.*3 rows and column 1 has 4"),
        ({"x": torch.zeros(3), "y": np.zeros(4)}, DataError, "Column 'x'.*3 rows and column 'y' has 4"),
        ([torch.zeros(3), torch.zeros(4)], DataError, "3 rows and column 1 has 4"),
        (torch.tensor(3.0), DataError, "is a scalar"),
        (np.array(["a", "b"]), DataError, "<U1.*no dtype"),
        (WrongRows(), DataError, "batch of 5 samples and returned 7 rows"),
        (TooFew(), DataError, "TooFew.__getitems__ was asked for 5 samples and returned 1"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (str, type)) else "",
)
def test_what_cannot_be_is_said(dataset: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(dataset)
