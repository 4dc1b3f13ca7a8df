"""Curricula as loaders read them: the same global batches at any world size, continued anywhere; what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import instep
from instep.core.errors import DataError, SpecError, TaskError
from instep.data.batch_plan import BatchSpec
from instep.data.kinds import open_chunks, open_loader
from instep.data.loader import LoadOptions
from loading import N, Squares

SCORES = np.random.default_rng(0).normal(size=N)
LENGTH = 40


def hardness(sample: Any) -> Any:
    return (int(sample[0]) * 7) % N


def rows(dataset: Any, first: int, last: int, world_size: int, **more: Any) -> list[list[Any]]:
    """Return the rows of the global batches of some steps, put together from the ranks' parts."""
    steps: list[list[Any]] = [[] for _ in range(first, last)]
    workers = more.pop("workers", 0)
    batches = BatchSpec(**{"seed": 1, "batch_size": 5, **more})
    for rank in range(world_size):
        options = LoadOptions(rank=rank, world_size=world_size, workers=workers, seed=1)
        loader = open_loader(dataset, batches, options)
        try:
            for number, batch in enumerate(loader.steps(first, last)):
                for part in batch.parts:
                    if part.plan.counted:
                        steps[number].append((part.plan.first_row, [t.tolist() for t in part.batch]))
        finally:
            loader.source.close()
    return [[column for _, part in sorted(step) for column in zip(*part, strict=True)] for step in steps]


CURRICULA: dict[str, Callable[[], Any]] = {
    "function": lambda: instep.data.curriculum(Squares(), hardness, pacing="root", epochs=3),
    "array": lambda: instep.data.curriculum((torch.arange(N), torch.arange(N) ** 2), SCORES, steps=13, start=0.1),
    "buckets": lambda: instep.data.curriculum(Squares(), SCORES, pacing="steps", buckets=3, steps=11),
    "lengths": lambda: instep.data.length_curriculum(
        (torch.arange(N * LENGTH).view(N, LENGTH), torch.arange(N)), LENGTH, 5, steps=13, multiple=3
    ),
}


@pytest.mark.parametrize("name", CURRICULA)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_the_same_batches_at_any_world_size_from_any_step(name: str, data: st.DataObject) -> None:
    more = {"accumulate": data.draw(st.integers(1, 2)), "drop_last": data.draw(st.booleans())}
    expected = rows(CURRICULA[name](), 0, 18, 1, **more)
    first = data.draw(st.integers(0, 17))
    for world_size in (2, 3, 5):
        assert rows(CURRICULA[name](), first, 18, world_size, **more) == expected[first:]


@pytest.mark.parametrize("name", CURRICULA)
def test_worker_processes_change_nothing(name: str) -> None:
    assert rows(CURRICULA[name](), 3, 12, 2, workers=2) == rows(CURRICULA[name](), 3, 12, 1)


def test_the_easiest_come_first_and_in_the_end_every_sample() -> None:
    steps = rows(CURRICULA["function"](), 0, 20, 1)
    easiest = {hardness([sample]) for step in steps[:1] for sample, _ in step}
    assert max(easiest) < 6, "a fifth of 23 samples is 5"
    for epoch in range(3, 4):
        samples = [sample for step in steps[5 * epoch : 5 * epoch + 5] for sample, _ in step]
        assert sorted(samples) == list(range(N))


def test_the_hardest_first() -> None:
    steps = rows(instep.data.curriculum(Squares(), hardness, epochs=3, reverse=True), 0, 2, 1)
    assert min(hardness([sample]) for step in steps[:1] for sample, _ in step) >= N - 5


def test_evaluations_read_every_sample_once_in_its_order() -> None:
    for name in ("function", "lengths"):
        chunks = open_chunks(CURRICULA[name](), 5, LoadOptions(workers=0, seed=1)).read()
        read = [row for batch, _ in chunks for row in zip(*(t.tolist() for t in batch), strict=True)]
        assert [row[1] for row in read] == [i * i if name == "function" else i for i in range(N)]
        assert name == "function" or len(read[0][0]) == LENGTH


def test_lengths_grow_and_only_sequences_are_cut() -> None:
    tokens, wide = torch.arange(N * LENGTH).view(N, LENGTH), torch.zeros(N, 7)
    dataset = instep.data.length_curriculum(
        {"x": tokens, "mask": tokens > 3, "wide": wide, "y": torch.arange(N)}, LENGTH, 8, epochs=2, buckets=5
    )
    loader = open_loader(dataset, BatchSpec(seed=1, batch_size=5), LoadOptions(workers=0, seed=1))
    batches = [step.parts[0].batch for step in loader.steps(0, 12)]
    assert [batch["x"].shape[1] for batch in batches] == [8, 8, 8, 16, 16, 24, 24, 24, 32, 32, 40, 40]
    for batch in batches:
        length = batch["x"].shape[1]
        assert torch.equal(batch["x"], tokens[batch["y"], :length])
        assert batch["x"].is_contiguous()
        assert batch["mask"].shape[1] == length
        assert batch["wide"].shape[1] == 7


def test_lengths_of_a_dataset_with_an_order_of_its_own() -> None:
    tokens = (torch.arange(N * LENGTH).view(N, LENGTH), torch.arange(N))
    easy_first = instep.data.curriculum(tokens, SCORES, epochs=3)
    both = rows(instep.data.length_curriculum(easy_first, LENGTH, 8, epochs=3), 0, 15, 1)
    assert [[row[1] for row in step] for step in both] == [[row[1] for row in s] for s in rows(easy_first, 0, 15, 1)]
    assert len(both[0][0][0]) == 8


def test_noise_differs_where_a_sample_comes_twice_in_an_epoch() -> None:
    class Noisy(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(index), torch.rand(())

    steps = rows(instep.data.curriculum(Noisy(), SCORES, epochs=4), 0, 5, 2)
    drawn = [row for step in steps for row in step]
    assert len({sample for sample, _ in drawn}) < N
    assert len({noise for _, noise in drawn}) == N
    assert rows(instep.data.curriculum(Noisy(), SCORES, epochs=4), 0, 5, 1) == steps


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from range(3)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"difficulty": SCORES[:-1]}, DataError, rf"shape \[{N - 1}\], and the dataset has {N} samples"),
        ({"difficulty": SCORES[:, None]}, DataError, rf"shape \[{N}, 1\]"),
        ({"difficulty": [0.0] * 4 + [float("nan")] * (N - 4)}, DataError, "19 samples is NaN, the first is sample 4"),
        ({"difficulty": ["easy"] * N}, DataError, "not numbers"),
        ({"difficulty": SCORES, "start": 0}, SpecError, "start=0"),
        ({"difficulty": SCORES, "pacing": "quick"}, SpecError, "Choose 'linear', 'root', 'exponential', 'steps'"),
        ({"difficulty": SCORES, "steps": 0}, SpecError, "steps=0"),
        ({"difficulty": SCORES, "rescore": 2}, SpecError, "rescore=2 is for scores of the model"),
        ({"difficulty": "loss", "rescore": 0}, SpecError, "rescore=0"),
        ({"difficulty": SCORES, "dataset": Stream()}, SpecError, "Stream is a stream"),
        ({"difficulty": SCORES, "dataset": [torch.zeros(N), torch.zeros(N)]}, SpecError, "columns or samples"),
        ({"difficulty": SCORES, "dataset": instep.data.curriculum(Squares(), SCORES, steps=1)}, SpecError, "already"),
    ],
)
def test_what_is_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        instep.data.curriculum(**{"dataset": Squares(), "steps": 5, **options})


@pytest.mark.parametrize(
    ("difficulty", "kind", "words"),
    [
        (None, TaskError, r"define difficulty\(sample\)"),
        ("loss", TaskError, r"run.score_by\(metrics\)"),
        (lambda sample: "hard", TaskError, "returned a str; a number is needed"),
        (lambda sample: float("nan") if sample[0] == 3 else 0.0, DataError, "1 samples is NaN, the first is sample 3"),
    ],
)
def test_what_is_refused_when_it_is_read(difficulty: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        rows(instep.data.curriculum(Squares(), difficulty, steps=5), 0, 1, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"start": 0}, "start=0"), ({"start": 41}, "at most full=40"), ({"multiple": 0}, "multiple=0"), ({}, "neither")],
)
def test_lengths_that_are_refused(options: dict[str, Any], words: str) -> None:
    more = {} if words == "neither" else {"steps": 5}
    with pytest.raises(SpecError, match=words):
        instep.data.length_curriculum(Squares(), **{"full": 40, "start": 8, **more, **options})


def test_nothing_that_could_be_cut() -> None:
    with pytest.raises(DataError, match="no tensor with a second dimension"):
        rows(instep.data.length_curriculum(Squares(), 40, 8, steps=5), 0, 1, 1)
