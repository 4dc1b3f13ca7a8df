"""Batches of any shape, cut by rows for a pipeline."""

from __future__ import annotations

import pytest
import torch

from instep.core.errors import TaskError
from instep.train.reading import cut_batch


def test_rows_are_cut_and_all_else_is_shared() -> None:
    batch = {"x": torch.arange(10).view(5, 2), "names": ["a", "b", "c", "d", "e"], "mask": torch.ones(3, 3)}
    pieces = cut_batch((batch, torch.tensor(2.0), 7), 5, 2)
    assert [(first, rows) for first, rows, _ in pieces] == [(0, 2), (2, 3)]
    (first, gain, number), (second, *_) = (piece for _, _, piece in pieces)
    assert first["x"].tolist() == [[0, 1], [2, 3]]
    assert second["x"].tolist() == [[4, 5], [6, 7], [8, 9]]
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d", "e"])
    assert first["mask"] is batch["mask"]
    assert (float(gain), number) == (2.0, 7)


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(TaskError, match="this one of 4 samples has no tensor with 4 entries in its first dimension"):
        cut_batch({"x": torch.ones(7, 4)}, 4, 2)
