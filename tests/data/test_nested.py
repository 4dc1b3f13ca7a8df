"""Nested batches: every tensor is reached, everything else stays."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from instep.core.errors import TaskError
from instep.data.nested import map_tensors, num_rows
from instep.world.tensors import nested_tensors


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    total: Any = field(init=False, default=0)


one, two = torch.ones(2), torch.ones(3)


@pytest.mark.parametrize(
    ("tree", "doubled"),
    [
        (one, one * 2),
        ((one, "a", None), (one * 2, "a", None)),
        ([one, [two]], [one * 2, [two * 2]]),
        ({"a": one, "b": {"c": two}}, {"a": one * 2, "b": {"c": two * 2}}),
        (OrderedDict(a=one), OrderedDict(a=one * 2)),
        (Pair(one, (two,)), Pair(one * 2, (two * 2,))),
        (3, 3),
    ],
)
def test_tensors_are_replaced_and_containers_kept(tree: Any, doubled: Any) -> None:
    found = map_tensors(lambda tensor: tensor * 2, tree)
    assert type(found) is type(tree)
    assert str(found) == str(doubled)


def test_a_frozen_dataclass_is_copied_not_changed() -> None:
    tree = Frozen({"a": one})
    found = map_tensors(lambda tensor: tensor * 2, tree)
    assert str(found) == str(Frozen({"a": one * 2}))
    assert str(tree) == str(Frozen({"a": one}))


def test_the_rows_are_the_first_tensors() -> None:
    assert num_rows((one, two)) == 2
    assert num_rows({"n": 7, "x": Frozen(two)}) == 3
    assert num_rows([torch.tensor(1.0), two]) == 3
    assert [len(tensor) for tensor in nested_tensors(Pair(one, {"a": [two]}))] == [2, 3]
    with pytest.raises(TaskError, match="dict holds no tensor"):
        num_rows({"a": "b"})
