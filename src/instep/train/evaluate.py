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
from instep.core.plural import plural
from instep.train.metric_objects import State, computed, gather_states, is_metric, state_of
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
                f"metric {name!r} gave {plural(array.size, 'value')} for a batch of {plural(num_rows, 'sample')}; "
                "one a sample is needed, or (values, weights)."
            )
        if weights is None:  # a mean over all rows
            weights = float(num_rows)
        counted = numpy.broadcast_to(_array(name, weights), array.shape)
        present = counted != 0  # weight 0 contributes nothing, even where the value is 0/0
        self._values.add(array[present] * counted[present])
        self._weights.add(counted)

    def agree(self, name: str, world: World) -> dict[str, float]:
        total, weight = ExactSum(), ExactSum()
        for values, weights in world.all_gather_object([self._values.to_json(), self._weights.to_json()]):
            total.merge(values)
            weight.merge(weights)
        return {name: total.over(weight)}


class _Merged:
    """A metric object, whose states are merged over chunks and ranks ([Note: Metric objects])."""

    def __init__(self) -> None:
        self._states: list[State] = []
        """One for each chunk; of an object that adds up all batches by itself, only the last one."""
        self.metric: Any = None

    def add(self, name: str, metric: Any, num_rows: int, exact: bool) -> None:
        del num_rows
        state = state_of(metric)
        if not state:
            raise TaskError(f"metric {name!r} is a {type(metric).__name__} without tensors: nothing can be added up.")
        if hasattr(metric, "reset"):
            metric.reset()
        elif metric is self.metric:
            if exact and any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in state.values()):
                raise TaskError(
                    f"metric {name!r} is one {type(metric).__name__} that adds up all batches by itself, in floats: "
                    "their sum depends on the number of processes. In exact mode, return a new one for each batch, or "
                    "give it a reset()."
                )
            self._states.clear()
        self._states.append(state)
        self.metric = metric

    def agree(self, name: str, world: World) -> dict[str, float]:
        states = gather_states(self._states, world)
        # A rank without a sample has no object to compute with.
        computing = [bool(flag) for flag in world.all_gather_object(self.metric is not None)].index(True)
        values = computed(name, self.metric, states) if world.rank == computing else None
        return dict(world.broadcast_object(values, computing))


def evaluate(
    metrics_of: MetricsOf, chunks: Iterable[tuple[Any, int]], world: World, exact: bool = False
) -> dict[str, float]:
    """Compute this rank's chunks, and return the metrics over all ranks' chunks. Called on all ranks.

    A chunk of 0 rows is another rank's: this one computes it too, and counts nothing of it.
    """
    entries: dict[str, _Mean | _Merged] = {}
    for batch, num_rows in chunks:
        if num_rows:
            _add(entries, metrics_of(batch), num_rows, exact)
        else:
            _compute_uncounted(entries, metrics_of, batch)
    # A rank may have had no chunk, or none in which a metric came up; all need all names, in one order.
    kinds: dict[str, bool] = {}
    for names in world.all_gather_object({name: type(entry) is _Mean for name, entry in entries.items()}):
        kinds |= {name: is_mean for name, is_mean in names.items() if name not in kinds}
    agreed = [entries.get(name, _Mean() if mean else _Merged()).agree(name, world) for name, mean in kinds.items()]
    return {name: value for values in agreed for name, value in values.items()}


def check_metrics(values: Any, num_rows: int, exact: bool) -> list[str]:
    """Raise TaskError for metrics that cannot be evaluated; return the names of the others."""
    if not isinstance(values, dict):
        raise TaskError(f"metrics returned a {type(values).__name__}; a dict of metrics by name is needed.")
    entries: dict[str, _Mean | _Merged] = {}
    _add(entries, values, num_rows, exact)
    return list(entries)


def _add(entries: dict[str, _Mean | _Merged], values: dict[str, Any], num_rows: int, exact: bool) -> None:
    for name, value in values.items():
        entries.setdefault(name, _Merged() if is_metric(value) else _Mean()).add(name, value, num_rows, exact)


def _compute_uncounted(entries: dict[str, _Mean | _Merged], metrics_of: MetricsOf, batch: Any) -> None:
    """Compute metrics, and count nothing of them, also in an object that the Task keeps."""
    objects = [entry.metric for entry in entries.values() if isinstance(entry, _Merged)]
    kept = [vars(metric) for metric in objects if not hasattr(metric, "reset")]
    before = copy.deepcopy(kept)
    for value in metrics_of(batch).values():
        if is_metric(value) and hasattr(value, "reset"):
            value.reset()
    for state, earlier in zip(kept, before, strict=True):
        state.update(earlier)


def _array(name: str, value: Any) -> numpy.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu", torch.float64).numpy()
    try:
        return numpy.asarray(value, dtype=numpy.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise TaskError(f"metric {name!r} gave a {type(value).__name__}; a tensor of numbers is needed.") from error
