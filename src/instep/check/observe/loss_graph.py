"""How a loss was made, as its autograd graph tells: by which numbers it was multiplied, and how it was reduced.

Ranks: all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

_REDUCTIONS = {1: "mean", 2: "sum"}
_TRANSPARENT = ("AliasBackward0", "CloneBackward0", "SqueezeBackward0", "ToCopyBackward0", "ViewBackward0")
_DEPTH = 12


@dataclass(frozen=True)
class LossGraph:
    """What the first nodes of a graph tell, the loss's own first; BackwardRan has the same fields."""

    factor: float = 1.0
    reduction: str = ""
    num_targets: int = 0
    num_ignored: int = 0
    all_reduced: bool = False


def read_loss(loss: torch.Tensor) -> LossGraph:
    """Return how a loss was made; what cannot be understood is left at its default."""
    try:
        return _read(loss.grad_fn, _DEPTH)
    except RuntimeError:  # a tensor that the graph has saved was changed in place, or freed: it cannot be read
        return LossGraph()


def _read(node: Any, depth: int) -> LossGraph:
    if node is None or not depth:
        return LossGraph()
    name = node.name()
    if (factor := _factor(node, name)) is not None:
        graph = _read(_only_input(node), depth - 1)
        return replace(graph, factor=graph.factor * factor)
    if name.startswith("_AllReduce"):
        return replace(_read(_only_input(node), depth - 1), all_reduced=True)
    if name in _TRANSPARENT:
        return _read(_only_input(node), depth - 1)
    if name == "AddBackward0":  # the term that counts most stands for a sum
        terms = [_read(term, depth - 1) for term, _ in node.next_functions if term is not None]
        return max(terms, key=lambda term: (abs(term.factor), bool(term.reduction)))
    return _reduced(node, name)


def _only_input(node: Any) -> Any:
    inputs = [before for before, _ in node.next_functions if before is not None]
    return inputs[0] if len(inputs) == 1 else None


def _factor(node: Any, name: str) -> float | None:
    """Return the number that a node multiplies by; None: it is no such node."""
    operation = name.rstrip("01")
    if operation == "NegBackward":
        return -1.0
    if operation not in ("MulBackward", "DivBackward") or _only_input(node) is None:
        return None
    other = node._saved_other
    if other is None and operation == "MulBackward":
        other = node._saved_self
    if isinstance(other, torch.Tensor):
        if other.numel() != 1:
            return None
    elif not isinstance(other, int | float):
        return None
    value = float(other)
    if operation == "MulBackward":
        return value
    return 1 / value if value else None


def _reduced(node: Any, name: str) -> LossGraph:
    """Return what the node that makes one number out of many tells."""
    if name == "MeanBackward0":
        return LossGraph(reduction="mean")
    if name == "SumBackward0":
        return LossGraph(reduction="sum")
    reduction = _REDUCTIONS.get(getattr(node, "_saved_reduction", 0), "")
    if not name.startswith("NllLoss"):
        return LossGraph(reduction=reduction)
    ignored = node._saved_ignore_index
    ignored -= 2**64 if ignored >= 2**63 else 0
    target = node._saved_target
    num_ignored = int((target == ignored).sum())
    return LossGraph(reduction=reduction, num_targets=target.numel() - num_ignored, num_ignored=num_ignored)


def nodes_of(loss: torch.Tensor, limit: int = 400) -> Iterator[Any]:
    """Yield the nodes of a graph, the nearest to the loss first."""
    seen: set[Any] = set()
    queue = [loss.grad_fn]
    while queue and len(seen) < limit:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        queue += [before for before, _ in node.next_functions]
