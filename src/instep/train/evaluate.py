"""Metrics over a whole evaluation set, exact to the last digit at any world size (C7).

Each sample is computed once, on one rank. Values are added up without rounding, and divided once.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from instep.core.errors import TaskError
from instep.core.exact_sum import ExactSum
from instep.world.world import World

MetricsOf = Callable[[Any], dict[str, Any]]
"""Returns the metrics of one batch: values by sample, (values, weights), or an object that can be added up."""


class _Mean:
    """A mean over samples."""

    def __init__(self) -> None:
        self._values, self._weights = ExactSum(), ExactSum()

    def add(self, name: str, metric: Any, num_rows: int, exact: bool) -> None:
        del exact  # it always is
        values, weights = metric if isinstance(metric, tuple) else (metric, 1.0)
        array = _array(name, values)
        if not isinstance(metric, tuple) and array.size != num_rows:
            raise TaskError(
                f"metric {name!r} gave {array.size} values for a batch of {num_rows} samples; "
                "one a sample is needed, or (values, weights)."
            )
        if weights is None:  # a mean over all rows
            weights = float(num_rows)
        counted = numpy.broadcast_to(_array(name, weights), array.shape)
        present = counted != 0  # weight 0 contributes nothing, even where the value is 0/0
        self._values.add(array[present] * counted[present])
        self._weights.add(counted)

    def agree(self, world: World) -> float:
        total, weight = ExactSum(), ExactSum()
        for values, weights in world.all_gather_object([self._values.to_json(), self._weights.to_json()]):
            total.merge(values)
            weight.merge(weights)
        return total.over(weight)


class _Summed:
    """A metric object: its tensors are added up over batches and ranks, then it computes, on rank 0.

    Floats are added up in the order of the chunks, whichever ranks computed them. An object that the Task keeps over
    batches has added up its rank's chunks in its own way: exact mode refuses that.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, torch.Tensor]] = []
        """One for each chunk; of an object that the Task keeps over batches, only the last one."""
        self.metric: Any = None

    def add(self, name: str, metric: Any, num_rows: int, exact: bool) -> None:
        del num_rows
        state = {key: _wide(value) for key, value in vars(metric).items() if isinstance(value, torch.Tensor)}
        if not state:
            raise TaskError(f"metric {name!r} is a {type(metric).__name__} without tensors, so nothing can be summed.")
        if metric is self.metric:
            if exact and any(value.is_floating_point() for value in state.values()):
                raise TaskError(
                    f"metric {name!r} is one {type(metric).__name__} that adds up all batches by itself, in floats: "
                    "their sum depends on the number of processes. In exact mode, return a new one for each batch."
                )
            self._states.clear()
        self._states.append(state)
        self.metric = metric

    def agree(self, world: World) -> float:
        # A rank without a sample has made no object; rank 0 has one if any rank has.
        first = self._states[0] if self._states else {}
        shapes = world.broadcast_object({key: [list(t.shape), t.is_floating_point()] for key, t in first.items()})
        totals = {key: self._total(world, key, shape, is_float) for key, (shape, is_float) in shapes.items()}
        if not world.is_main:
            return float(world.broadcast_object(None))
        whole = copy.copy(self.metric)  # the Task may keep its own
        vars(whole).update(totals)
        return float(world.broadcast_object(float(whole.compute())))

    def _total(self, world: World, key: str, shape: list[int], is_float: bool) -> torch.Tensor:
        """Return one tensor, added up over all chunks of all ranks. Called on all ranks."""
        dtype = torch.float64 if is_float else torch.int64
        counts = [int(count) for count in world.all_gather_object(len(self._states))]
        padded = torch.zeros(max(counts), *shape, dtype=dtype)
        for row, state in zip(padded, self._states, strict=False):
            row.copy_(state[key])
        by_rank = [part.cpu() for part in world.all_gather(padded.to(world.device))]
        total = torch.zeros(shape, dtype=dtype)
        for number in range(max(counts)):  # chunk c was rank c % world_size's
            for part, count in zip(by_rank, counts, strict=True):
                if number < count:
                    total += part[number]
        return total


def evaluate(
    metrics_of: MetricsOf, chunks: Iterable[tuple[Any, int]], world: World, exact: bool = False
) -> dict[str, float]:
    """Compute this rank's chunks, and return the metrics over all ranks' chunks. Called on all ranks.

    A chunk of 0 rows is another rank's: this one computes it too, and counts nothing of it.
    """
    entries: dict[str, _Mean | _Summed] = {}
    for batch, num_rows in chunks:
        if not num_rows:
            kept = [vars(entry.metric) for entry in entries.values() if isinstance(entry, _Summed)]
            before = copy.deepcopy(kept)
            metrics_of(batch)
            for state, earlier in zip(kept, before, strict=True):  # an object that the Task keeps has counted it
                state.update(earlier)
            continue
        for name, value in metrics_of(batch).items():
            kind = _Summed if hasattr(value, "update") and hasattr(value, "compute") else _Mean
            entries.setdefault(name, kind()).add(name, value, num_rows, exact)
    # A rank may have had no chunk, or none in which a metric came up; all need all names, in one order.
    kinds: dict[str, bool] = {}
    for names in world.all_gather_object({name: type(entry) is _Mean for name, entry in entries.items()}):
        kinds |= {name: is_mean for name, is_mean in names.items() if name not in kinds}
    return {name: entries.get(name, _Mean() if mean else _Summed()).agree(world) for name, mean in kinds.items()}


def _array(name: str, value: Any) -> numpy.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu", torch.float64).numpy()
    try:
        return numpy.asarray(value, dtype=numpy.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise TaskError(f"metric {name!r} gave a {type(value).__name__}; a tensor of numbers is needed.") from error


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    # Always a copy: the object may continue to count in the same memory.
    return tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else torch.int64, copy=True)
