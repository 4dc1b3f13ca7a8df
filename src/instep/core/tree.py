"""The canonical binary tree over a step's shards: the order in which their gradients are added.

[Note: Canonical tree]
A sum of floats depends on its brackets. Here the brackets depend on the number of shards alone: the leaves 0..n-1 are
halved, with the odd one in the left half, and so on down. A rank with a run of neighbouring leaves adds the largest
subtrees inside it. Then the subtrees of all ranks, side by side, are added by the same rule. So any split of the leaves
into runs gives the bits that one rank with all leaves gets.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]
"""The leaves first..last-1 that a subtree covers."""


@lru_cache(maxsize=64)
def _inner_nodes(num_leaves: int) -> frozenset[tuple[int, int, int]]:
    """Return the subtrees of two or more leaves: first, middle, last."""
    nodes = []
    todo = [(0, num_leaves)]
    while todo:
        first, last = todo.pop()
        if last - first > 1:
            middle = (first + last + 1) // 2
            nodes.append((first, middle, last))
            todo += [(first, middle), (middle, last)]
    return frozenset(nodes)


@lru_cache(maxsize=1024)
def cover(first: int, last: int, num_leaves: int) -> tuple[Node, ...]:
    """Return the largest subtrees inside a run of leaves, from left to right."""
    total = TreeSum[None](num_leaves, lambda _left, _right: None)
    for leaf in range(first, last):
        total.put((leaf, leaf + 1), None)
    return tuple(node for node, _ in total.parts)


def run_of(rank: int, world_size: int, num_leaves: int) -> Node:
    """Return the run of leaves that a rank computes; it may be empty where there are fewer leaves than ranks."""
    return num_leaves * rank // world_size, num_leaves * (rank + 1) // world_size


class TreeSum(Generic[T]):
    """Adds two neighbours as soon as they are the halves of a subtree."""

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]) -> None:
        self.parts: list[tuple[Node, T]] = []
        """The sums so far, from left to right; in the end one, of all leaves."""
        self._inner = _inner_nodes(num_leaves)
        self._add = add

    def put(self, node: Node, value: T) -> None:
        """Add a subtree's value; subtrees come from left to right."""
        while self.parts and (self.parts[-1][0][0], node[0], node[1]) in self._inner:
            (first, _), left = self.parts.pop()
            node, value = (first, node[1]), self._add(left, value)
        self.parts.append((node, value))
