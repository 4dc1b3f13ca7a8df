"""Nested batches: every tensor is reached, everything else stays."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from instep.data.nested import map_tensors
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
    mapped = map_tensors(lambda tensor: tensor * 2, tree)
    assert type(mapped) is type(tree)
    assert str(mapped) == str(doubled)


def test_a_frozen_dataclass_is_copied_not_changed() -> None:
    tree = Frozen({"a": one})
    mapped = map_tensors(lambda tensor: tensor * 2, tree)
    assert str(mapped) == str(Frozen({"a": one * 2}))
    assert str(tree) == str(Frozen({"a": one}))


def test_tensors_are_found_at_any_depth() -> None:
    assert [len(tensor) for tensor in nested_tensors(Pair(one, {"a": [two]}))] == [2, 3]
    assert list(nested_tensors({"a": "b"})) == []
