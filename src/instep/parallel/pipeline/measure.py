"""What the layers of a chain cost, and where it may be cut: found by going through it once with a few rows.

Ranks: one; what it finds is told to the others.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from instep.core.errors import TaskError
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call
from instep.parallel.pipeline.chain import Chain, StageFunction, quietly
from instep.parallel.pipeline.wire import is_passable

_REPEATS, _MOST_REPEATS = 3, 20
_ENOUGH_S = 2e-3


@dataclass(frozen=True)
class Measured:
    """What going through a chain shows, by layer."""

    costs: list[float]
    """Seconds, or where nothing could be measured parameters."""
    passable: list[bool]
    """Whether what a layer gives can travel to another rank."""
    noise_uses: list[list[int]]
    """How often each noisy layer of the context was used until a layer ended."""

    def to_json(self) -> dict[str, Any]:
        """Give the fields as plain values."""
        return asdict(self)


def measure(model: nn.Module, chain: Chain, call: Call, context: BatchContext) -> Measured:
    """Go through a chain with the arguments of one call, and check that it gives what the model gives.

    The layers take turns on the device, where the whole model may not fit.
    """
    layers = [_Layer(model, chain, number, context.noise.device) for number in range(len(chain.names))]
    context.end_part()
    with quietly(model):
        expected = model(*call.positional, **call.named)
        there = call.to(context.noise.device)
        costs, values = [], [None]
        for layer in layers:
            seconds, found = layer.time(there, values[-1])
            costs.append(seconds)
            values.append(found)
        _check_same(model, expected, values[-1])
        uses = list(_noise_uses(layers, there, context))
    passable = [is_passable(value) for value in values[1:]]
    return Measured(_even_out(costs, _kinds(model, chain, call, values)), passable, uses)


class _Layer:
    """One layer of a chain, on the device while it computes."""

    def __init__(self, model: nn.Module, chain: Chain, number: int, device: torch.device) -> None:
        self._function = chain.stage(number, number + 1)
        used = chain.uses(number).tensors
        self._tensors = [t for t in (*model.parameters(), *model.buffers()) if id(t) in used]
        self._device = device

    def __call__(self, call: Call, value: Any) -> Any:
        with self._there():
            return self._function(call, value)

    def time(self, call: Call, value: Any) -> tuple[float, Any]:
        """Compute it a few times; give the shortest, and what it gave."""
        with self._there():
            return _time(self._function, call, value, self._device)

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        before = [t.data for t in self._tensors]
        for t in self._tensors:
            t.data = t.data.to(self._device)
        try:
            yield
        finally:
            for t, data in zip(self._tensors, before, strict=True):
                t.data = data


def _time(function: StageFunction, call: Call, value: Any, device: torch.device) -> tuple[float, Any]:
    """Compute a layer a few times; give the shortest, and what it gave. What takes no time is repeated more often."""
    best, spent = math.inf, 0.0
    for number in range(_MOST_REPEATS):
        begun = time.perf_counter()
        found = function(call, value)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = time.perf_counter() - begun
        best, spent = min(best, taken), spent + taken
        if number + 1 >= _REPEATS and spent > _ENOUGH_S:
            break
    return best, found


def _kinds(model: nn.Module, chain: Chain, call: Call, values: Sequence[Any]) -> list[Any]:
    """Tell layers apart by the shapes of what they compute with: weights, what comes in and what goes out."""
    shapes = {id(t): tuple(t.shape) for t in (*model.parameters(), *model.buffers())}
    given = ((call.positional, call.named), *values[1:])
    passing = [tuple(tuple(t.shape) for t in tree_flatten(v)[0] if isinstance(t, torch.Tensor)) for v in given]
    return [
        (passing[number], passing[number + 1], tuple(sorted(shapes[t] for t in chain.uses(number).tensors)))
        for number in range(len(chain.names))
    ]


def _even_out(costs: Sequence[float], kinds: Sequence[Any]) -> list[float]:
    """Let layers of one kind cost the same: what one of them took longer came from without."""
    least: dict[Any, float] = {}
    for cost, kind in zip(costs, kinds, strict=True):
        least[kind] = min(cost, least.get(kind, math.inf))
    return [least[kind] for kind in kinds]


def estimate(model: nn.Module, chain: Chain) -> Measured:
    """Guess the costs by the number of parameters, where there is nothing to go through the chain with."""
    sizes = {id(p): p.numel() for p in model.parameters()}
    costs = [1.0 + sum(sizes.get(t, 0) for t in chain.uses(number).tensors) for number in range(len(chain.names))]
    return Measured(costs, [True] * len(costs), [])


def _noise_uses(layers: Sequence[_Layer], call: Call, context: BatchContext) -> Iterator[list[int]]:
    """Count how often each noisy layer is used: each use draws noise of its own ([Note: Row noise])."""
    for layer in context.noisy:
        if isinstance(layer, nn.Module):
            layer.train()
    doubts = dict(context.doubts)
    context.begin_part(0, 1, replicated=True)
    value: Any = None
    for compute in layers:
        value = compute(call, value)
        yield [layer.uses for layer in context.noisy]
    context.end_part()
    context.doubts.clear()  # these rows are nobody's
    context.doubts.update(doubts)


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
    atol = 1e-5
    if ours.device != theirs.device and theirs.numel():  # a GPU may round what goes into a convolution to ten bits
        atol = 1e-2 * float(theirs.double().nan_to_num().abs().max())
    return ours.shape == theirs.shape and torch.allclose(ours.to(theirs), theirs, rtol=1e-3, atol=atol, equal_nan=True)
