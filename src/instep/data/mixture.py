"""Several datasets as one, a share of every batch from each.

Ranks: all, alike.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from instep.core.errors import DataError, SpecError
from instep.data.batch_plan import BatchSpec
from instep.data.by_rows import BeginRow, by_rows, read_rows
from instep.data.dataset import BatchDataset
from instep.data.digest import shape_of
from instep.data.order import Indices, Order
from instep.data.ordered import OrderedDataset, order_of, samples_of
from instep.data.orders.keyed import hash64
from instep.data.orders.mixture import MixtureOrder, WeightsOf
from instep.data.sampling import check_indexed, check_num_samples, checked_weights

Shares = Mapping[str, float] | Sequence[float]


def mix(
    datasets: Mapping[str, Any], weights: Shares | Callable[[int], Shares], num_samples: int | None = None
) -> OrderedDataset:
    """Return a mixture of datasets: of every batch, each has the share that its weight says.

    `weights`: one for each dataset, by name or in their order, or a function of the step (0, 1, …) that returns them;
    it must always return the same for a step. `num_samples`: in an epoch; by default as many as all datasets have. A
    dataset that is used up begins its next epoch. A dataset may have an order of its own.
    """
    if not isinstance(datasets, Mapping) or not datasets:
        raise SpecError(f"mix needs datasets by name, and got {datasets!r:.80}. Use mix({{name: dataset}}).")
    check_num_samples(num_samples)
    for name, dataset in datasets.items():
        check_indexed(dataset, f"mix: {name!r}")
    names = list(datasets)
    weights_of = _weights_by_step(weights, names) if callable(weights) else _constant_weights(weights, names)
    parts = {name: by_rows(samples_of(dataset)) for name, dataset in datasets.items()}
    sizes = [len(part) for part in parts.values()]

    def make_order(batches: BatchSpec) -> Order:
        orders = {}
        for name, dataset in datasets.items():
            # Sources of the same size must not be in the same order.
            own = replace(batches, seed=int(hash64(f"{batches.seed}/source {name}")[0]) >> 1, batch_tokens=None)
            orders[name] = order_of(dataset, len(parts[name]), own)
        total = num_samples or sum(order.num_samples for order in orders.values())
        return MixtureOrder(batches, orders, sizes, weights_of, total)

    return OrderedDataset(MixedDataset(parts), make_order, comes_once=False)


def _constant_weights(weights: Shares, names: list[str]) -> WeightsOf:
    row = checked_weights(_by_name(weights, names), [repr(name) for name in names], "mix: weights")[None]
    return lambda _steps: row


def _weights_by_step(weights: Callable[[int], Shares], names: list[str]) -> WeightsOf:
    def weights_of(steps: Indices) -> npt.NDArray[np.float64]:
        given = [weights(step) for step in steps.tolist()]
        if isinstance(given[0], Mapping) or {len(row) for row in given} != {len(names)}:
            given = [_by_name(row, names) for row in given]
        # Not np.array(given), which takes twice as long: a run that resumes looks at all earlier steps.
        rows = np.fromiter(itertools.chain.from_iterable(given), np.float64).reshape(-1, len(names))
        with np.errstate(over="ignore"):
            odd = np.flatnonzero(~(rows >= 0).all(axis=1) | ~rows.any(axis=1) | ~np.isfinite(rows.sum(axis=1)))
        for place in odd.tolist():
            what = f"mix: weights at step {int(steps[place])}"
            rows[place] = checked_weights(rows[place], [repr(name) for name in names], what)
        return rows

    return weights_of


def _by_name(weights: Shares, names: list[str]) -> list[float]:
    """Return one weight for each name, in their order."""
    if isinstance(weights, Mapping):
        if weights.keys() != set(names):
            raise SpecError(f"mix: weights for {list(weights)}, but the datasets are {names}. Give one for each.")
        return [weights[name] for name in names]
    if len(weights) != len(names):
        raise SpecError(f"mix: {len(weights)} weights for {len(names)} datasets, {names}. Give one for each.")
    return list(weights)


class MixedDataset(BatchDataset):
    """The samples of several datasets, numbered one dataset after the other."""

    def __init__(self, parts: Mapping[str, BatchDataset]) -> None:
        self._names, self._parts = list(parts), list(parts.values())
        sizes = torch.tensor([len(part) for part in self._parts])
        self._ends = sizes.cumsum(0)
        self._starts = self._ends - sizes
        self.is_thread_safe = all(part.is_thread_safe for part in self._parts)
        self.draws_by_row = any(part.draws_by_row for part in self._parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def share_blocks(self, num_processes: int) -> None:
        """Share decoded blocks of all parts with the other processes of this machine."""
        for part in self._parts:
            part.share_blocks(num_processes)

    def gather(self, indices: torch.Tensor) -> Any:
        """Return these samples as one batch, each part read by the batch."""
        if self.draws_by_row:
            return default_collate(self.rows(indices))
        numbers, own = self._located(indices)
        order = numbers.argsort(stable=True)
        counts = numbers.bincount(minlength=len(self._parts)).tolist()
        chosen = zip(self._names, self._parts, own[order].split(counts), counts, strict=True)
        batches = {name: part.gather(here) for name, part, here, count in chosen if count}
        return _merged(list(batches.values()), order.argsort(), list(batches))

    def rows(self, indices: torch.Tensor, begin_row: BeginRow | None = None) -> list[Any]:
        """Return these samples one by one."""
        numbers, own = self._located(indices)
        rows = read_rows(self._parts, numbers.tolist(), own, begin_row)
        self._check_alike(numbers.tolist(), rows)
        return rows

    def _check_alike(self, numbers: list[int], rows: list[Any]) -> None:
        """Raise DataError if rows of two parts have other fields."""
        (first, row), *others = dict(zip(numbers, rows, strict=True)).items()
        for number, other in others:
            if _fields(other) != _fields(row):
                raise _unlike([self._names[first], self._names[number]], [row, other], "sample")

    def _located(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of each sample's part, and its index there."""
        numbers = torch.searchsorted(self._ends, indices, right=True)
        return numbers, indices - self._starts[numbers]


def _merged(batches: list[Any], order: torch.Tensor, names: list[str]) -> Any:
    """Return batches of several sources as one, whose rows stand in this order."""
    first = batches[0]
    if all(isinstance(batch, torch.Tensor) for batch in batches):
        if len({(batch.dtype, batch.shape[1:], batch.device) for batch in batches}) == 1:
            return torch.cat(batches).index_select(0, order.to(first.device))
    elif all(type(batch) is type(first) for batch in batches):
        if isinstance(first, Mapping) and all(batch.keys() == first.keys() for batch in batches):
            merged = {key: _merged([batch[key] for batch in batches], order, names) for key in first}
            return merged if type(first) is dict else type(first)(merged)  # type: ignore[call-arg]
        if isinstance(first, tuple | list) and len({len(batch) for batch in batches}) == 1:
            if isinstance(first, list) and not any(isinstance(item, torch.Tensor | Mapping | tuple) for item in first):
                items = [item for batch in batches for item in batch]  # texts, one for each row
                return [items[place] for place in order.tolist()]
            columns = [_merged(list(column), order, names) for column in zip(*batches, strict=True)]
            return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            changed = copy.copy(first)
            for field in dataclasses.fields(first):
                column = [getattr(batch, field.name) for batch in batches]
                object.__setattr__(changed, field.name, _merged(column, order, names))  # it may be frozen
            return changed
    raise _unlike(names, batches, "batch")


def _fields(row: Any) -> Any:
    """Return what rows of all sources must have alike; lengths may differ where a collate pads them."""
    if isinstance(row, Mapping):
        return set(row)
    return len(row) if isinstance(row, tuple) else type(row)


def _unlike(names: list[str], entries: list[Any], what: str) -> DataError:
    words = [shape_of(entry) for entry in entries]
    other = next((number for number, word in enumerate(words) if word != words[0]), len(words) - 1)
    return DataError(
        f"mix: a {what} of {names[0]!r} has {words[0]}, and one of {names[other]!r} has {words[other]}. Samples of all "
        "sources must have the same keys, dtypes and shapes: convert them, for instance with .map(fn)."
    )
