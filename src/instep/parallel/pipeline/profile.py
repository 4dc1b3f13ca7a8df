"""What the layers of a model cost, and where they are split into stages.

Ranks: `profile_layers` on one, which broadcasts the profile; the rest on all.
"""

import contextlib
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from instep.core.errors import TaskError
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call
from instep.parallel.pipeline.activations import is_sendable
from instep.parallel.pipeline.layers import LayerSequence
from instep.parallel.preserve import evaluating
from instep.world.device import synchronize
from instep.world.tensors import nested_tensors

_REPEATS, _MOST_REPEATS = 3, 20
_ENOUGH_S = 2e-3
_ROUNDS, _QUICK_S = 3, 0.1
"""How often all layers are measured one after the other, if they take less than that."""


@dataclass(frozen=True)
class LayerProfile:
    """Measurements of each layer."""

    costs: list[float]
    """Seconds; where nothing could be measured, numbers of parameters."""
    sendable: list[bool]
    """Whether a layer's output can be sent to another rank."""
    noise_uses: list[list[int]]
    """How often each noisy layer of the context has been used when a layer ends."""


def profile_layers(model: nn.Module, layers: LayerSequence, call: Call, context: BatchContext) -> LayerProfile:
    """Run the layers on the arguments of one call; check that they compute what the model computes.

    The layers are moved to the device one at a time, because the whole model may not fit.
    """
    placed = [_PlacedLayer(model, layers, number, context.noise.device) for number in range(len(layers.names))]
    trained = [module for module in model.modules() if module.training]
    context.end_part()
    with evaluating(model), torch.no_grad():
        expected = model(*call.positional, **call.named)
        device_call = call.to(context.noise.device)
        costs, values = [], [None]
        for layer in placed:
            seconds, output = layer.time(device_call, values[-1])
            costs.append(seconds)
            values.append(output)
        _check_same(model, expected, values[-1])
        for _ in range(
            _ROUNDS - 1 if sum(costs) < _QUICK_S else 0
        ):  # another process disturbs layers that are neighbours
            again = [layer.time(device_call, value)[0] for layer, value in zip(placed, values, strict=False)]
            costs = list(map(min, costs, again))
        for module in trained:
            module.training = not isinstance(module, _NormBase)  # which needs more than these rows, and draws nothing
        noise_uses = list(_noise_uses(placed, device_call, context))
    sendable = [is_sendable(value) for value in values[1:]]
    return LayerProfile(_equalize(costs, _kinds(model, layers, call, values)), sendable, noise_uses)


class _PlacedLayer:
    """One layer, on the device while it computes."""

    def __init__(self, model: nn.Module, layers: LayerSequence, number: int, device: torch.device) -> None:
        self._function = layers.stage(number, number + 1)
        used = layers.uses(number).tensors
        self._tensors = [t for t in (*model.parameters(), *model.buffers()) if id(t) in used]
        self._device = device

    def __call__(self, call: Call, value: Any) -> Any:
        with self._on_device():
            return self._function(call, value)

    def time(self, call: Call, value: Any) -> tuple[float, Any]:
        """Return the shortest time of a few runs, and the output. A very fast layer is run more often."""
        best, total = math.inf, 0.0
        with self._on_device():
            for number in range(_MOST_REPEATS):
                begun = time.perf_counter()
                output = self._function(call, value)
                synchronize(self._device)
                seconds = time.perf_counter() - begun
                best, total = min(best, seconds), total + seconds
                if number + 1 >= _REPEATS and total > _ENOUGH_S:
                    break
        return best, output

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        before = [t.data for t in self._tensors]
        for t in self._tensors:
            t.data = t.data.to(self._device)
        try:
            yield
        finally:
            for t, data in zip(self._tensors, before, strict=True):
                t.data = data


def _kinds(model: nn.Module, layers: LayerSequence, call: Call, values: Sequence[Any]) -> list[Any]:
    """Return a key for each layer: the shapes of its input, output and weights."""
    shapes = {id(t): tuple(t.shape) for t in (*model.parameters(), *model.buffers())}
    passed = [tuple(tuple(t.shape) for t in nested_tensors(value)) for value in (call, *values[1:])]
    return [
        (passed[number], passed[number + 1], tuple(sorted(shapes[t] for t in layers.uses(number).tensors)))
        for number in range(len(layers.names))
    ]


def _equalize(costs: Sequence[float], kinds: Sequence[Any]) -> list[float]:
    """Return the least cost of its kind for each layer: what one of them took longer was a disturbance."""
    least: dict[Any, float] = {}
    for cost, kind in zip(costs, kinds, strict=True):
        least[kind] = min(cost, least.get(kind, math.inf))
    return [least[kind] for kind in kinds]


def estimate_profile(model: nn.Module, layers: LayerSequence) -> LayerProfile:
    """Estimate the costs by the number of parameters, where there is no example call to run."""
    sizes = {id(p): p.numel() for p in model.parameters()}
    costs = [1.0 + sum(sizes.get(t, 0) for t in layers.uses(number).tensors) for number in range(len(layers.names))]
    return LayerProfile(costs, [True] * len(costs), [])


def _noise_uses(layers: Sequence[_PlacedLayer], call: Call, context: BatchContext) -> Iterator[list[int]]:
    """Count the uses of each noisy layer, and the draws of torch's functions: each has noise of its own."""
    doubts = dict(context.doubts)
    context.begin_part(0, 1, replicated=True)
    value: Any = None
    for compute in layers:
        value = compute(call, value)
        yield [layer.uses for layer in context.noisy]
    context.end_part()
    context.doubts.clear()  # doubts about these rows concern nobody
    context.doubts.update(doubts)


def _check_same(model: nn.Module, expected: Any, actual: Any) -> None:
    ours, theirs = tree_leaves(actual), tree_leaves(expected)
    if len(ours) == len(theirs) and all(map(_is_close, ours, theirs)):
        return
    raise TaskError(
        f"the layers of a {type(model).__name__}, applied one after the other, do not compute what the model computes. "
        "If layers(model) names them, they must make up the whole model, in order. If not, the forward pass depends on "
        "more than its inputs (on self.training, for instance): define layers(model) in the Task."
    )


def _is_close(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return bool(ours == theirs)
    atol = 1e-5
    if ours.device != theirs.device and theirs.numel():  # a GPU may round a convolution's inputs to ten bits
        atol = 1e-2 * float(theirs.double().nan_to_num().abs().max())
    return ours.shape == theirs.shape and torch.allclose(ours.to(theirs), theirs, rtol=1e-3, atol=atol, equal_nan=True)


@dataclass(frozen=True)
class StagePlan:
    """Where a sequence of layers is split into stages."""

    bounds: tuple[int, ...]
    """Stage s has the layers from bounds[s] to bounds[s + 1] - 1."""
    costs: tuple[float, ...]
    """Of each stage."""

    def describe(self, names: Sequence[str]) -> str:
        """Return the stages' first and last layers, and their shares of the cost, for a message."""
        total = sum(self.costs) or 1.0
        stages = []
        for (first, last), cost in zip(itertools.pairwise(self.bounds), self.costs, strict=True):
            span = names[first] if last == first + 1 else f"{names[first]} … {names[last - 1]}"
            stages.append(f"{span} ({cost / total:.0%})")
        return ", ".join(stages)


def plan_stages(layers: LayerSequence, profile: LayerProfile, model: nn.Module, num_stages: int) -> StagePlan:
    """Decide where to split: stages of about the same cost, each with something to train."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    has_weights = [bool(layers.uses(number).tensors & trained) for number in range(len(layers.names))]
    ends = _possible_ends(has_weights, profile.sendable)
    if len(ends) < num_stages:
        raise TaskError(
            f"a {type(model).__name__} has {len(ends)} {'layers' if len(ends) != 1 else 'layer'} with weights that can "
            f"be on different ranks, and a pipeline of {num_stages} stages needs {num_stages}. Use fewer processes "
            "along pp (and not schedule=interleaved, which has two stages on each), or name more layers by "
            "layers(model) in the Task."
        )
    costs = [sum(profile.costs[first:last]) for first, last in itertools.pairwise([0, *ends])]
    bounds = tuple([0, *ends][cut] for cut in balance(costs, num_stages))
    return StagePlan(bounds, tuple(sum(profile.costs[a:b]) for a, b in itertools.pairwise(bounds)))


def _possible_ends(has_weights: Sequence[bool], sendable: Sequence[bool]) -> list[int]:
    """Return after which layers a stage may end: it has weights, the next layer has, and its output can be sent.

    So a layer without weights stays with the one before: an activation function that works in place must not begin a
    stage.
    """
    ends: list[int] = []
    stage_has_weights = False
    for end, (has, next_has) in enumerate(itertools.pairwise(has_weights), 1):
        stage_has_weights |= has
        if stage_has_weights and sendable[end - 1] and next_has:
            ends.append(end)
            stage_has_weights = False
    return [*ends, len(has_weights)] if any(has_weights) else []


def balance(costs: Sequence[float], count: int) -> list[int]:
    """Split a chain into `count` runs with the smallest possible maximal cost; return the bounds, from 0 to the end.

    Of equally good splits, return the one whose runs differ least. No run is empty.
    """
    assert 1 <= count <= len(costs)
    sums = [0.0, *itertools.accumulate(costs)]

    def cost(first: int, last: int) -> float:
        return sums[last] - sums[first]

    least = max(itertools.starmap(cost, itertools.pairwise(_best(len(costs), count, cost, max))))
    most = least + 1e-9 * abs(sums[-1])  # differences of sums round; equal costs must stay equal

    def square(first: int, last: int) -> float:
        own = cost(first, last)
        return own * own if own <= most else math.inf

    return _best(len(costs), count, square, operator.add)


def _best(
    size: int, count: int, worth: Callable[[int, int], float], combine: Callable[[float, float], float]
) -> list[int]:
    """Return the bounds for which the runs' worths, combined (the maximum or the sum), are smallest."""
    best = [0.0, *[math.inf] * size]
    back: list[list[int]] = []
    for run in range(1, count + 1):
        totals, origin = [math.inf] * (size + 1), [run - 1] * (size + 1)
        for last in range(run, size - (count - run) + 1):
            for first in range(run - 1, last):
                total = combine(best[first], worth(first, last))
                if total < totals[last]:
                    totals[last], origin[last] = total, first
        best = totals
        back.append(origin)
    bounds = [size]
    for origin in reversed(back):
        bounds.append(origin[bounds[-1]])
    return bounds[::-1]
