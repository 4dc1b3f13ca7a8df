"""Hugging Face `datasets`, the real library: tables read by the batch, in its formats, with its transforms."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import Subset

from loading import assert_same, load, make

N = 23
TABLE = datasets.Dataset.from_dict(
    {"x": [[float(i), i / 2] for i in range(N)], "label": list(range(N)), "text": [f"text {i}" for i in range(N)]}
)


def test_a_table_is_read_by_the_batch_as_a_dict_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    table, calls = TABLE.with_format("torch"), []
    getitems = datasets.Dataset.__getitems__
    monkeypatch.setattr(datasets.Dataset, "__getitems__", lambda self, keys: calls.append(keys) or getitems(self, keys))
    loader = make(table)
    seen = []
    for batch in loader.steps(0, 5):
        rows, indices = batch.parts[0].batch, loader.sample_indices(batch.step)
        assert_same(rows["x"], torch.stack([torch.tensor(indices), torch.tensor(indices) / 2], 1).float())
        assert_same(rows["label"], torch.tensor(indices))
        assert rows["text"] == [f"text {i}" for i in indices]
        seen += indices.tolist()
    assert sorted(seen) == list(range(N))
    assert [len(keys) for keys in calls] == [5, 5, 5, 5, 3]


def test_without_a_format_values_are_stacked_by_torch() -> None:
    (batch, *_) = load(TABLE.select_columns(["label"]), 0, 1)
    assert batch.parts[0].batch["label"].dtype == torch.int64


def flipped(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Augment, as the transforms of images do."""
    return {"x": [torch.tensor(x) + torch.rand(1) for x in rows["x"]], "label": rows["label"]}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_draws_by_sample(workers: int) -> None:
    table = TABLE.with_transform(flipped)
    whole = load(table, 0, 5, workers=workers)
    for world_size in (2, 3):
        ranks = [load(Subset(table, range(N)), 0, 5, world_size=world_size, rank=rank) for rank in range(world_size)]
        for step, batch in enumerate(whole):
            parts = [part.batch["x"] for own in ranks for part in own[step].parts if part.plan.counted]
            assert_same(torch.cat(parts), batch.parts[0].batch["x"])
