"""What the layers of a chain cost, and where it may be cut: found by going through it once with a few rows.

Ranks: one; what it finds is told to the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from instep.core.errors import TaskError
from instep.parallel.capture import Call
from instep.parallel.pipeline.chain import Chain, quietly
from instep.parallel.pipeline.wire import is_passable
from instep.parallel.scope import Scope

_REPEATS = 3


@dataclass(frozen=True)
class Measured:
    """What going through a chain shows, by layer."""

    costs: list[float]
    """Seconds, or where nothing could be measured parameters."""
    passable: list[bool]
    """Whether what a layer gives can travel to another rank."""
    noise_uses: list[list[int]]
    """How often each noisy layer of the scope was used until a layer ended."""

    def to_json(self) -> dict[str, Any]:
        """Give the fields as plain values."""
        return asdict(self)


def measure(model: nn.Module, chain: Chain, call: Call, scope: Scope) -> Measured:
    """Go through a chain with the arguments of one call, and check that it gives what the model gives."""
    functions = [chain.stage(number, number + 1) for number in range(len(chain.names))]
    scope.end_part()
    with quietly(model):
        expected = model(*call.positional, **call.named)
        costs, values = [], []
        value: Any = None
        for function in functions:
            best = float("inf")
            for _ in range(_REPEATS):
                begun = time.perf_counter()
                found = function(call, value)
                best = min(best, time.perf_counter() - begun)
            costs.append(best)
            values.append(value := found)
        _check_same(model, expected, value)
        uses = list(_noise_uses(functions, call, scope))
    return Measured(costs, [is_passable(value) for value in values], uses)


def estimate(model: nn.Module, chain: Chain) -> Measured:
    """Guess the costs by the number of parameters, where there is nothing to go through the chain with."""
    sizes = {id(p): p.numel() for p in model.parameters()}
    costs = [1.0 + sum(sizes.get(t, 0) for t in chain.uses(number).tensors) for number in range(len(chain.names))]
    return Measured(costs, [True] * len(costs), [])


def _noise_uses(functions: Sequence[Any], call: Call, scope: Scope) -> Iterator[list[int]]:
    """Count how often each noisy layer is used: each use draws noise of its own ([Note: Row noise])."""
    for layer in scope.noisy:
        if isinstance(layer, nn.Module):
            layer.train()
    doubts = dict(scope.doubts)
    scope.begin_part(0, 1, replicated=True)
    value: Any = None
    for function in functions:
        value = function(call, value)
        yield [layer.uses for layer in scope.noisy]
    scope.end_part()
    scope.doubts.clear()  # these rows are nobody's
    scope.doubts.update(doubts)


def _check_same(model: nn.Module, expected: Any, found: Any) -> None:
    ours, theirs = tree_flatten(found)[0], tree_flatten(expected)[0]
    if len(ours) == len(theirs) and all(map(_is_close, ours, theirs)):
        return
    raise TaskError(
        f"the layers of a {type(model).__name__}, applied one after the other, do not give what the model gives. If "
        "layers(model) names them, they must make up the whole model, in order; if not, the forward pass depends on "
        "more than its inputs (on self.training, say): define layers(model) in the Task."
    )


def _is_close(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return bool(ours == theirs)
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5, equal_nan=True)
