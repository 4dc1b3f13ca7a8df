"""The canonical binary tree over a step's shards: in which order what they give is added up.

[Note: Canonical tree]
A sum of floats depends on how it is bracketed. Here the brackets depend on the number of shards alone: the leaves
0..n-1 are halved, the left half getting the odd one, and so on down. Whoever holds a run of neighbouring leaves adds
up the largest subtrees inside it; the subtrees of all, put side by side, are then added up by the same rule. So any
cut of the leaves into runs gives the bits that one holder of all of them gets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]
"""The leaves first..last-1 that a subtree covers."""


@lru_cache(maxsize=64)
def _inner_nodes(num_leaves: int) -> frozenset[tuple[int, int, int]]:
    """List the subtrees of two or more leaves: first, middle, last."""
    found = []
    todo = [(0, num_leaves)]
    while todo:
        first, last = todo.pop()
        if last - first > 1:
            middle = (first + last + 1) // 2
            found.append((first, middle, last))
            todo += [(first, middle), (middle, last)]
    return frozenset(found)


@lru_cache(maxsize=1024)
def cover(first: int, last: int, num_leaves: int) -> tuple[Node, ...]:
    """Give the largest subtrees inside a run of leaves, from left to right."""
    total = TreeSum[None](num_leaves, lambda _left, _right: None)
    for leaf in range(first, last):
        total.put((leaf, leaf + 1), None)
    return tuple(node for node, _ in total.parts)


def run_of(rank: int, world_size: int, num_leaves: int) -> Node:
    """Give the run of leaves that a rank works through; empty where there are fewer leaves than ranks."""
    return num_leaves * rank // world_size, num_leaves * (rank + 1) // world_size


class TreeSum(Generic[T]):
    """Adds neighbours up as soon as they are the two halves of a subtree."""

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]) -> None:
        self.parts: list[tuple[Node, T]] = []
        """What is added up so far, from left to right; in the end one part, the whole."""
        self._inner = _inner_nodes(num_leaves)
        self._add = add

    def put(self, node: Node, value: T) -> None:
        """Add a subtree's value; subtrees come from left to right."""
        while self.parts and (self.parts[-1][0][0], node[0], node[1]) in self._inner:
            (first, _), left = self.parts.pop()
            node, value = (first, node[1]), self._add(left, value)
        self.parts.append((node, value))
