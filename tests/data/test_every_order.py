"""Every order, alike: what an epoch holds, the same batches at any world size, worker count and continuation.

To test another order or source: one line in CASES. A batch of its dataset is a pair of columns: which samples they
are, and noise or anything else.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import Dataset

from instep import data
from instep.data.batch_plan import BatchSpec
from instep.data.dataset import BatchDataset
from instep.data.kinds import open_loader
from instep.data.loader import GlobalBatch, Loader, LoadOptions

N = 61
NUMBERS = np.arange(N)
LENGTHS = NUMBERS * 7919 % 23 + 1
CLASSES = (NUMBERS % 7 == 0).astype(int) + (NUMBERS % 11 == 0)
WEIGHTS = (NUMBERS % 5).astype(float)


class Drawing(Dataset[Any]):
    """(i, noise of its own): sample by sample."""

    def __init__(self, size: int = N, first: int = 0) -> None:
        self._size, self._first = size, first

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self._first + index), torch.rand(())


class Blocks(BatchDataset):
    """Read by the batch, in blocks."""

    is_thread_safe = True

    def __init__(self, size: int = N, first: int = 0) -> None:
        self._size, self._first = size, first
        self.block_sizes = np.bincount(np.arange(size) // 6)

    def __len__(self) -> int:
        return self._size

    def gather(self, indices: torch.Tensor) -> Any:
        return self._first + indices, torch.zeros(len(indices))


def with_noise(sample: Any) -> Any:
    return sample[0], torch.rand(())


def columns(size: int = N, first: int = 0) -> Any:
    return first + torch.arange(size), torch.zeros(size)


def mixture(weights: Any, **options: Any) -> Any:
    sources = {
        "plain": Drawing(30),
        "columns": columns(20, 30),
        "blocks": Blocks(8, 50).map(with_noise),
        "weighted": data.weighted(Drawing(3, 58), [1, 2, 3]),
    }
    return data.mix(sources, weights, **options)


def growing(step: int) -> list[float]:
    return [1.0, 2.0, step / 10, 0.0 if step < 3 else 1.0]


def as_pair(row: dict[str, Any]) -> Any:
    number = row["number.json"] if "__key__" in row else row["number"]  # of a tar
    return torch.as_tensor(number), torch.rand(())


def source(kind: str) -> BatchDataset:
    """Return the numbers 0..N-1 from files of a format, in blocks, with noise of their own."""
    return _opened_source(kind).map(as_pair)


@cache
def _opened_source(kind: str) -> BatchDataset:
    folder = Path(_FILES.name) / kind
    folder.mkdir()
    for file, first in enumerate(range(0, N, 25)):
        WRITERS[kind](folder / f"part-{file}", range(first, min(first + 25, N)))
    options: dict[str, Any] = {"cache": folder / "cache"}
    opened: BatchDataset = getattr(data, kind)(folder, **options)
    return opened


def write_parquet(path: Path, numbers: range) -> None:
    table = pyarrow.table({"number": list(numbers)})
    pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=6)


def write_jsonl(path: Path, numbers: range) -> None:
    path.with_suffix(".jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in numbers))


def write_tar(path: Path, numbers: range) -> None:
    with tarfile.open(path.with_suffix(".tar"), "w") as archive:
        for number in numbers:
            content = json.dumps(number).encode()
            member = tarfile.TarInfo(f"{number:03}.number.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


WRITERS = {"parquet": write_parquet, "jsonl": write_jsonl, "tar": write_tar}
_FILES = tempfile.TemporaryDirectory(prefix="every-order-")


def once(samples: list[int], epoch: int) -> None:
    del epoch
    assert sorted(samples) == list(range(N))


def no_zero_weights(samples: list[int], epoch: int) -> None:
    del epoch
    assert len(samples) == N
    assert all(WEIGHTS[sample] > 0 for sample in samples)


def distinct(count: int, samples: list[int], epoch: int) -> None:
    del epoch
    assert all(WEIGHTS[sample] > 0 for sample in samples)
    assert len(samples) == len(set(samples)) == count


def equal_classes(samples: list[int], epoch: int) -> None:
    del epoch
    counts = np.bincount(CLASSES[samples])
    assert counts.sum() == N
    assert counts.max() - counts.min() <= 2  # a round of all classes may be cut at both ends


def groups_together(samples: list[int], epoch: int) -> None:
    once(samples, epoch)
    assert np.count_nonzero(np.diff(NUMBERS[samples] // 4)) == (N - 1) // 4


def first_source(share: float, samples: list[int], epoch: int) -> None:
    del epoch
    assert abs(sum(sample < 30 for sample in samples) - share * len(samples)) <= 4


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    check: Callable[[list[int], int], None] = once
    """Raises unless these are the samples of an epoch."""
    spec: tuple[tuple[str, Any], ...] = ()


CASES = {
    "plain": Case(Drawing),
    "columns": Case(columns),
    "blocks": Case(Blocks, spec=(("shuffle_window", 12),)),
    "mapped": Case(lambda: Blocks().map(with_noise)),
    "split": Case(lambda: data.split(Drawing(2 * N), 0.5)[0], lambda samples, _: None),
    "weighted": Case(lambda: data.weighted(Drawing(), WEIGHTS), no_zero_weights),
    "weighted-once": Case(lambda: data.weighted(Drawing(), WEIGHTS, 20, replacement=False), partial(distinct, 20)),
    "balanced": Case(lambda: data.balanced(columns(), CLASSES), equal_classes),
    "grouped": Case(lambda: data.grouped(Drawing(), NUMBERS // 4), groups_together),
    "bucketed": Case(lambda: data.bucketed(Drawing(), LENGTHS)),
    "bucketed-window": Case(lambda: data.bucketed(Blocks(), LENGTHS), spec=(("shuffle_window", 14),)),
    "tokens": Case(lambda: data.bucketed(Drawing(), LENGTHS), spec=(("batch_tokens", 60),)),
    "mix": Case(lambda: mixture([4, 3, 2, 1]), partial(first_source, 0.4)),
    "mix-by-step": Case(lambda: mixture(growing), lambda samples, _: None),
    "mix-of-columns": Case(
        lambda: data.mix({"a": columns(30), "b": columns(31, 30)}, {"b": 3, "a": 1}), partial(first_source, 0.25)
    ),
    "mixup": Case(lambda: data.mixup(Noisy(), 0.4), lambda samples, _: None),
    "curriculum": Case(lambda: data.curriculum(Drawing(), LENGTHS, epochs=2), lambda samples, _: None),
    "curriculum-in-an-epoch": Case(
        lambda: data.curriculum(Drawing(), NUMBERS, start=0.3, steps=4), lambda samples, _: None
    ),
    **{kind: Case(partial(source, kind), spec=(("shuffle_window", 20),)) for kind in WRITERS},
    "parquet-split": Case(lambda: data.split(source("parquet"), 0.5)[0], lambda samples, _: None),
    "jsonl-weighted": Case(lambda: data.weighted(source("jsonl"), WEIGHTS), no_zero_weights),
    "tar-grouped": Case(lambda: data.grouped(source("tar"), NUMBERS // 4), groups_together),
    "parquet-tokens": Case(lambda: data.bucketed(source("parquet"), LENGTHS), spec=(("batch_tokens", 60),)),
    "mix-of-sources": Case(
        lambda: data.mix({kind: source(kind) for kind in WRITERS}, [1, 2, 3]), lambda samples, _: None
    ),
    "tar-curriculum": Case(lambda: data.curriculum(source("tar"), LENGTHS, epochs=2), lambda samples, _: None),
}
every = pytest.mark.parametrize("name", CASES)


class Noisy(BatchDataset):
    """(float, float target), for blends."""

    def __len__(self) -> int:
        return N

    def gather(self, indices: torch.Tensor) -> Any:
        return indices.float(), indices.float() / N


@cache
def dataset(name: str) -> Any:
    return CASES[name].make()


def opened(name: str, world_size: int = 1, rank: int = 0, workers: int = 0, **more: Any) -> Loader:
    spec = {"seed": 3, "batch_size": 7, **dict(CASES[name].spec), **more}
    options = LoadOptions(rank=rank, world_size=world_size, workers=workers, seed=3)
    return open_loader(dataset(name), BatchSpec(**spec), options)


def steps(loader: Loader, first: int, last: int) -> list[GlobalBatch]:
    try:
        return list(loader.steps(first, last))
    finally:
        loader.source.close()


Rows = list[tuple[float, float]]


def global_batches(name: str, first: int, last: int, world_size: int, **more: Any) -> list[Rows]:
    """Return the rows of each global batch, put together from the parts of all ranks."""
    batches: list[dict[int, tuple[float, float]]] = [{} for _ in range(first, last)]
    for rank in range(world_size):
        for batch in steps(opened(name, world_size, rank, **more), first, last):
            rows = batches[batch.step - first]
            for plan, (numbers, noise) in batch.parts:
                for row, entry in enumerate(zip(numbers.tolist(), noise.tolist(), strict=True)):
                    assert plan.replicated or plan.first_row + row not in rows
                    assert rows.setdefault(plan.first_row + row, entry) == entry
            assert batch.size == len(rows) or rank < world_size - 1
    return [[rows[number] for number in range(len(rows))] for rows in batches]


@cache
def alone(name: str) -> list[Rows]:
    return global_batches(name, 0, 2 * num_steps(name), 1)


def num_steps(name: str) -> int:
    loader = opened(name)
    assert loader.steps_per_epoch is not None
    return loader.steps_per_epoch


def samples_of(batches: list[Rows]) -> list[int]:
    return [int(number) for rows in batches for number, _ in rows]


@every
def test_what_an_epoch_holds(name: str) -> None:
    count, batches = num_steps(name), alone(name)
    for epoch in range(2):
        CASES[name].check(samples_of(batches[epoch * count : (epoch + 1) * count]), epoch)
    assert batches[:count] != batches[count:], "two epochs differ"


@every
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_same_batches_at_any_world_size(name: str, world_size: int) -> None:
    assert global_batches(name, 0, 2 * num_steps(name), world_size) == alone(name)


@every
def test_the_same_batches_in_exact_mode_and_micro_batches(name: str) -> None:
    last = num_steps(name) + 2
    assert global_batches(name, 0, last, 3, shards=4) == alone(name)[:last]
    assert global_batches(name, 0, last, 2, accumulate=2) == alone(name)[:last]


@every
def test_any_step_to_begin_with_at_another_world_size(name: str) -> None:
    last = 2 * num_steps(name)
    for first in range(0, last, 3):
        assert global_batches(name, first, last, 1 + first % 4) == alone(name)[first:]


@every
def test_the_same_batches_from_worker_processes(name: str) -> None:
    workers = 1 + list(CASES).index(name) % 3
    assert global_batches(name, 2, 6, 1, workers=workers) == alone(name)[2:6]


@every
def test_another_seed_is_another_order(name: str) -> None:
    assert global_batches(name, 0, 3, 1, seed=4) != alone(name)[:3]


def test_the_orders_stay_what_they_were() -> None:
    """The order of a seed must never change between versions: a run that continues would train on other samples."""
    digests = {name: digest(samples_of(alone(name))) for name in ORDERS}
    assert digests == ORDERS


def digest(samples: list[int]) -> str:
    return hashlib.sha256(repr(samples).encode()).hexdigest()[:8]


ORDERS = {
    "plain": "4bdd6e65",
    "columns": "4bdd6e65",
    "blocks": "a62d5bfa",
    "mapped": "a4579095",
    "split": "e64f9dfd",
    "weighted": "63109e26",
    "weighted-once": "d3ddc11d",
    "balanced": "ba8da609",
    "grouped": "757354c6",
    "bucketed": "9f94b305",
    "bucketed-window": "2761a578",
    "tokens": "e229ee0c",
    "mix": "3ec74967",
    "mix-by-step": "936e8062",
    "mix-of-columns": "08f2459c",
}
