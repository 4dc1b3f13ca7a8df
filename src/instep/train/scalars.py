"""Scalars: numbers of one's own beside the loss, returned by a Task's `loss` or logged by a loop.

[Note: Scalars]
A scalar is a mean over the rows of a part, and counts as the loss does: by its share of the rows, or by the weight. Its
sum and its weight travel with the step's other sums (`StepSums.scalars`), in slots by the order of names that all ranks
know. A name that is new, or has no slot, is exchanged by itself after the reduction of that step; a count among the
sums tells all ranks that there is one. All are added up in the order of their rows, so that in exact mode the bits are
the same at any world size.

Ranks: all, alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from instep.core.errors import TaskError
from instep.data.loader import Part
from instep.events.schema import EpochRecord, StepRecord
from instep.parallel.strategy import NO_SCALARS, NUM_SCALARS, StepSums
from instep.world.device import wide_dtype
from instep.world.world import World


class LossParts(NamedTuple):
    """What a Task's loss returned."""

    mean: Any
    weight: Any = None
    """None where it counts by its rows."""
    scalars: Mapping[str, Any] | None = None


def loss_parts(value: Any) -> LossParts:
    """Return what a Task's loss returned: a mean, (mean, weight), or a dict with "loss", "weight" and scalars."""
    if isinstance(value, tuple):
        return LossParts(*value)
    if isinstance(value, torch.Tensor) or not isinstance(value, Mapping):
        return LossParts(value)
    if "loss" not in value:
        names = ", ".join(map(str, value)) or "nothing"
        raise TaskError(
            f'loss returned a dict with {names}, and without "loss". Return {{"loss": mean, …}}: the mean over the '
            "batch, and scalars to log beside it."
        )
    scalars = {name: number_of(name, value[name]) for name in value if name not in ("loss", "weight")}
    return LossParts(value["loss"], value.get("weight"), scalars)


class ScalarSums:
    """The scalars of one step. `names` are those that all ranks know, in the order of their slots; it grows."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._sums: dict[str, tuple[Any, float]] = {}
        """Of this rank's parts since the last agreement: mean times weight, and the weight."""
        self._new: list[tuple[int, int, str, float, float]] = []
        """Those without a slot: the part's first row, their number in it, the name, the sum, the weight."""
        self._totals: dict[str, tuple[float, float]] = {}
        """Of all ranks."""

    def add(self, scalars: Mapping[str, Any], weight: float) -> None:
        """Count the means of some rows."""
        for name, value in scalars.items():
            total, counted = self._sums.get(name, (0.0, 0.0))
            if weight:
                self._sums[name] = total + number_of(name, value) * weight, counted + weight

    def on_device(self) -> list[torch.Tensor]:
        """Return the sums that are still on a device."""
        return [total for total, _ in self._sums.values() if isinstance(total, torch.Tensor)]

    def arrive(self, numbers: list[float]) -> None:
        """Replace the sums that are on a device by what they are."""
        arrived = iter(numbers)
        for name, (total, weight) in self._sums.items():
            if isinstance(total, torch.Tensor):
                self._sums[name] = next(arrived), weight

    def sums(self, parts: Sequence[Part]) -> tuple[float, tuple[Any, ...]]:
        """Return how many have no slot, and the slots of the rest; `parts` are those that they were counted in."""
        if not self._sums:  # most steps
            return 0.0, NO_SCALARS
        first_row = min((part.plan.first_row for part in parts), default=0)
        slots: list[Any] = [*NO_SCALARS]
        known = {name: 2 * number for number, name in enumerate(self._names[:NUM_SCALARS])}
        num_new = 0
        for number, (name, (total, weight)) in enumerate(self._sums.items()):
            if name in known:
                slots[known[name] : known[name] + 2] = total, weight
            else:
                num_new += 1
                self._new.append((first_row, number, name, float(total), weight))
        return float(num_new), tuple(slots)

    def end_shard(self) -> None:
        """Begin with nothing: the sums of a shard are on their way."""
        self._sums = {}

    def begin_pass(self) -> None:
        """Begin with nothing: the ranks have agreed."""
        self._sums, self._new = {}, []

    def agree(self, sums: StepSums, world: World, is_counted: bool) -> None:
        """Take the sums of all ranks, and exchange what has no slot. Called on all ranks."""
        for number, name in enumerate(self._names[:NUM_SCALARS]):
            self._merge(name, float(sums.scalars[2 * number]), float(sums.scalars[2 * number + 1]))
        if sums.num_new_scalars:
            by_rank = world.all_gather_object(self._new if is_counted else [])
            for _, _, name, total, weight in sorted(tuple(entry) for entries in by_rank for entry in entries):
                if name not in self._names:
                    self._names.append(name)
                self._merge(name, total, weight)

    def means(self) -> dict[str, float]:
        """Return the means over the global batch, in the order of the names."""
        if not self._totals:
            return {}
        counted = {name: self._totals[name] for name in self._names if name in self._totals}
        return {name: total / weight for name, (total, weight) in counted.items()}

    def copy(self) -> dict[str, tuple[Any, float]]:
        """Return what was counted since the last agreement."""
        return dict(self._sums)

    def restore(self, sums: dict[str, tuple[Any, float]]) -> None:
        """Return to an earlier `copy`."""
        self._sums = sums

    def _merge(self, name: str, total: float, weight: float) -> None:
        if weight:
            before, counted = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = before + total, counted + weight


def number_of(name: str, value: Any) -> Any:
    """Return a scalar as a float, or on a GPU as a tensor; raise TaskError for what is no number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        wide = value.detach().reshape(()).to(wide_dtype(value.device))
        return wide.item() if wide.device.type == "cpu" else wide
    if isinstance(value, int | float):
        return float(value)
    kind = f"tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise TaskError(
        f"the scalar {name!r} is a {kind}; a single number is needed, the mean over the batch. Beside the loss, a "
        "dict has numbers to log and nothing else."
    )


class EpochMeans:
    """The means of an epoch, over its samples, from the records of its steps; part of the checkpoint."""

    def __init__(self) -> None:
        self._num_samples = 0
        self._sums: dict[str, list[float]] = {}
        """By name: the sum of mean times samples, and the samples. The loss's name is empty."""

    def take(self, record: StepRecord, ends_epoch: bool) -> EpochRecord | None:
        """Count a step; at the end of an epoch return its record."""
        self._num_samples += record.num_samples
        if not record.skipped:
            self._add("", record.loss, record.num_samples)
            for name, mean in record.scalars.items():
                self._add(name, mean, record.num_samples)
        if not ends_epoch:
            return None
        means = {name: total / count for name, (total, count) in self._sums.items()}
        num_samples, self._num_samples, self._sums = self._num_samples, 0, {}
        if "" not in means:  # every step was skipped
            return None
        loss = means.pop("")
        return EpochRecord(epoch=record.epoch, step=record.step, loss=loss, num_samples=num_samples, scalars=means)

    def _add(self, name: str, mean: float, num_samples: int) -> None:
        sums = self._sums.get(name)
        if sums is None:
            sums = self._sums[name] = [0.0, 0.0]
        sums[0] += mean * num_samples
        sums[1] += num_samples

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"num_samples": self._num_samples, "sums": self._sums}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what a checkpoint holds."""
        self._num_samples = int(state["num_samples"])
        self._sums = {str(name): [float(total), float(count)] for name, (total, count) in state["sums"].items()}
