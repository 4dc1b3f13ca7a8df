"""What weights, labels, groups, lengths and sources may be: everything else is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from instep import data
from instep.core.errors import DataError, InstepError, SpecError
from instep.data.batch_plan import BatchSpec
from instep.data.dataset import BatchDataset
from instep.data.kinds import open_loader
from instep.data.loader import LoadOptions

TEN = torch.arange(10)
NAN = float("nan")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def load(dataset: Any, *, batch_size: int = 4, **options: Any) -> list[Any]:
    loader = open_loader(dataset, BatchSpec(seed=1, batch_size=batch_size, **options), LoadOptions(seed=1, workers=0))
    assert loader.steps_per_epoch is not None
    return [batch.parts[0].batch for batch in loader.steps(0, loader.steps_per_epoch)]


def other_at(step: int) -> list[float]:
    return [1.0, -2.0 if step == 7 else 1.0]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "negative": (lambda: data.weighted(TEN, [-1.5, *[1] * 9]), r"-1\.5 for sample 0 is no weight"),
    "far": (lambda: data.weighted(TEN, [*[1] * 9, -2]), r"-2\.0 for sample 9 is no weight"),
    "NaN": (lambda: data.weighted(TEN, [1, NAN, *[1] * 8]), "nan for sample 1 is no weight"),
    "infinite": (lambda: data.weighted(TEN, [float("inf")] * 10), "inf for sample 0 is no weight"),
    "all zero": (lambda: data.weighted(TEN, np.zeros(10)), "all 10 are zero"),
    "too few": (lambda: data.weighted(TEN, [1, 2]), "weights has 2 entries and the dataset 10 samples"),
    "a table": (lambda: data.weighted(TEN, np.ones((5, 2))), r"shape \(5, 2\)"),
    "nothing": (lambda: data.weighted(TEN, [1] * 10, 0), "num_samples=0 leaves nothing"),
    "too many": (
        lambda: data.weighted(TEN, [0, *[1] * 9], 10, replacement=False),
        "num_samples=10 without replacement, but only 9 of 10 weights",
    ),
    "stream": (lambda: data.weighted(Stream(), [1] * 10), r"\(Stream\) is a stream"),
    "twice": (lambda: data.weighted(data.grouped(TEN, TEN), [1] * 10), "already has an order of its own"),
    "labels": (lambda: data.balanced(TEN, [1] * 9), "labels has 9 entries and the dataset 10 samples"),
    "no label": (lambda: data.balanced(TEN, [NAN] * 10), "that of sample 0 is NaN"),
    "odd labels": (lambda: data.balanced(TEN, np.array([1, "a", None] * 3 + [1], object)), "cannot be sorted"),
    "groups": (lambda: data.grouped(TEN, [[1]] * 10), r"groups have the shape \(10, 1\)"),
    "lengths": (lambda: data.bucketed(TEN, [3] * 9 + [-1]), "-1 of sample 9 is no number of tokens"),
    "half": (lambda: data.bucketed(TEN, [2.5] * 10), r"2\.5 of sample 0 is no number of tokens"),
    "texts": (lambda: data.bucketed(TEN, ["long"] * 10), "dtype <U4"),
    "no sources": (lambda: data.mix({}, {}), "mix needs datasets by name"),
    "names": (lambda: data.mix({"a": TEN, "b": TEN}, {"a": 1, "c": 1}), r"weights for \['a', 'c'\].*\['a', 'b'\]"),
    "number": (lambda: data.mix({"a": TEN, "b": TEN}, [1, 2, 3]), "3 weights for 2 datasets"),
    "share": (lambda: data.mix({"a": TEN, "b": TEN}, [1, -1]), r"weights: -1\.0 for 'b'"),
    "no share": (lambda: data.mix({"a": TEN, "b": TEN}, [0, 0]), "all 2 are zero"),
    "by step": (lambda: load(data.mix({"a": TEN, "b": TEN}, other_at)), r"at step 7: -2\.0 for 'b'"),
    "stream in a mix": (lambda: data.mix({"a": Stream()}, [1]), "'a': the dataset .* is a stream"),
    "fraction": (lambda: data.split(TEN, 1.0), r"fraction=1\.0 leaves one of two parts empty"),
    "empty part": (lambda: data.split(TEN, 0.01), "10 samples leaves the first part empty"),
    "one group": (lambda: data.split(TEN, 0.5, groups=[1] * 10), "10 samples in 1 groups leaves the"),
    "ordered": (lambda: data.split(data.grouped(TEN, TEN), 0.5), "belongs to all its samples"),
    "column": (lambda: data.split({"x": TEN}, 0.5, by="y"), r"by='y' is none of the columns \['x'\]"),
    "no columns": (lambda: data.split(TEN, 0.5, by="y"), "a Tensor has none"),
    "one fold": (lambda: data.folds(TEN, 1), "k=1 folds of 10 samples"),
    "folds": (lambda: data.folds(TEN, 4, groups=[1, 2] * 5), "k=4 folds of 2 groups"),
    "alpha": (lambda: data.mixup(TEN, 0.0), r"alpha=0\.0"),
    "no pair": (lambda: data.mixup(TEN)[0], "blend pairs"),
    "no float": (lambda: data.mixup((TEN, TEN), num_classes=10)[0], "blend floats"),
    "num_classes": (lambda: data.mixup((TEN.float(), TEN))[0], "give num_classes"),
    "classes": (lambda: data.mixup((TEN.float(), TEN), num_classes=1)[9], "none of num_classes=1"),
    "no image": (lambda: data.cutmix((TEN.float(), TEN), num_classes=10)[0], "cutmix needs images"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(InstepError, match=message) as refused:
        make()
    assert str(refused.value).endswith((".", ")"))


@pytest.mark.parametrize("tokens", [9, 100])
def test_a_sample_longer_than_a_batch(tokens: int) -> None:
    dataset = data.bucketed(TEN, [3] * 6 + [10, 4, 4, 4])
    if tokens == 9:
        with pytest.raises(SpecError, match="batch_tokens=9 is less than the 10 tokens of sample 6"):
            load(dataset, batch_tokens=9)
    else:
        assert torch.cat(load(dataset, batch_tokens=tokens)).sort().values.tolist() == list(range(10))


@pytest.mark.parametrize(
    "other",
    [torch.arange(10.0), {"x": TEN}, (TEN, TEN), torch.zeros(10, 2, dtype=torch.int64)],
    ids=["dtype", "dict", "tuple", "shape"],
)
def test_sources_with_other_samples(other: Any) -> None:
    with pytest.raises(DataError, match=r"mix: a (batch|sample) of 'a' has .*'b' has .*\.map\(fn\)"):
        load(data.mix({"a": TEN, "b": other}, [1, 1]))


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor(index)}


def test_sources_with_other_fields_sample_by_sample() -> None:
    with pytest.raises(DataError, match="mix: a sample of"):
        load(data.mix({"a": Pairs(), "b": {"y": TEN}}, [1, 1]))


def test_weights_of_any_size() -> None:
    for scale in (1e308, 1e-308):
        weights = [0, *[scale] * 9]
        assert torch.cat(load(data.weighted(TEN, weights, replacement=False))).sort().values.tolist() == [*range(1, 10)]
        assert torch.cat(load(data.weighted(TEN, weights))).min() > 0
        for shares in ([0, scale], lambda _step, scale=scale: [0, scale]):
            assert torch.cat(load(data.mix({"a": TEN, "b": 10 + TEN}, shares))).min() >= 10


def test_labels_of_any_kind() -> None:
    for labels in (["a", "b"] * 5, np.array([0.5, 1.5] * 5), torch.tensor([3, 9] * 5)):
        batches = load(data.balanced(TEN, labels), batch_size=2)
        assert all((batch % 2).sum() == 1 for batch in batches)


def test_nested_batches_of_sources_are_merged() -> None:
    sources = {
        name: {"ids": first + TEN, "twice": torch.stack([first + TEN] * 2, dim=1)}
        for name, first in (("a", 0), ("b", 10))
    }
    batches = load(data.mix(sources, [1, 1]))
    for batch in batches:
        assert (batch["twice"] == batch["ids"][:, None]).all()
    assert sorted(torch.cat([batch["ids"] for batch in batches]).tolist()) == list(range(20))


@dataclass(frozen=True)
class Row:
    ids: torch.Tensor
    pair: tuple[torch.Tensor, list[str]]


class Records(BatchDataset):
    def __init__(self, first: int) -> None:
        self._first = first

    def __len__(self) -> int:
        return 10

    def gather(self, indices: torch.Tensor) -> Row:
        ids = self._first + indices
        return Row(ids, (2 * ids, [str(number) for number in ids.tolist()]))


def test_batches_of_any_container_are_merged() -> None:
    for batch in load(data.mix({"a": Records(0), "b": Records(10)}, [1, 1])):
        assert batch.pair[0].tolist() == (2 * batch.ids).tolist()
        assert batch.pair[1] == [str(number) for number in batch.ids.tolist()]


class Drawn(BatchDataset):
    draws_by_row = True

    def __len__(self) -> int:
        return 10

    def gather(self, indices: torch.Tensor) -> Any:
        return torch.stack(self.rows(indices))

    def rows(self, indices: torch.Tensor, begin_row: Any = None) -> list[Any]:
        rows = []
        for row in range(len(indices)):
            if begin_row is not None:
                begin_row(row)
            rows.append(torch.rand(()))
        return rows


def test_a_subset_of_a_dataset_that_draws_keeps_its_noise() -> None:
    whole, sizes = [], (1, 4, 10)
    for batch_size in sizes:
        whole.append(torch.cat(load(Subset(Drawn(), range(10)), batch_size=batch_size)).tolist())
    assert whole[0] == whole[1] == whole[2]
    assert len(set(whole[0])) == 10


def test_an_evaluation_reads_each_sample_once() -> None:
    from instep.data.kinds import open_chunks

    for dataset in (data.weighted(TEN, [0] * 9 + [1]), data.mix({"a": TEN[:5], "b": TEN[5:]}, [1, 0])):
        chunks = open_chunks(dataset, 3, LoadOptions(seed=0, workers=0))
        assert torch.cat([batch for batch, _ in chunks.read()]).tolist() == list(range(10))
