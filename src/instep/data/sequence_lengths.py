"""A curriculum of lengths: sequences are short at first, and grow to their whole length.

Ranks: all, alike: the length is that of the step.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any

import torch

from instep.core.errors import DataError, SpecError
from instep.data.batch_plan import BatchPlan
from instep.data.curricula import check_indexed
from instep.data.loader import num_samples
from instep.data.nested import map_tensors
from instep.data.ordered import BatchTransform, OrderedDataset, order_of, samples_of
from instep.data.orders.pacing import Pacing
from instep.world.tensors import nested_tensors


def length_curriculum(
    dataset: Any,
    full: int,
    start: int,
    *,
    pacing: str | Callable[[float], float] = "linear",
    steps: int | None = None,
    epochs: int | None = None,
    buckets: int | None = None,
    multiple: int = 8,
) -> OrderedDataset:
    """Return a dataset whose batches are cut to `start` tokens at first, and to `full` after so many steps or epochs.

    A batch's length is the second dimension of its first tensor that has one; all tensors with that second dimension
    are cut, and keep their beginning. Lengths are rounded up to a multiple of `multiple`. Evaluations are not cut.
    """
    if not 1 <= start <= full:
        raise SpecError(f"start={start} is not possible: it is a number of tokens, at least 1 and at most full={full}.")
    if multiple < 1:
        raise SpecError(f"multiple={multiple} is not possible: lengths are multiples of at least 1.")
    samples = samples_of(dataset)
    check_indexed(samples)
    first = start / full if isinstance(pacing, str) else None
    paced = Pacing(pacing=pacing, start=first, steps=steps, epochs=epochs, buckets=buckets)

    def transform(plan: BatchPlan) -> BatchTransform:
        levels = paced.levels(plan.num_batches)
        first_steps = [level.first_step for level in levels]
        # Not one more because a product such as 0.7 * 10 is rounded up.
        lengths = [min(full, math.ceil(level.fraction * full / multiple - 1e-9) * multiple) for level in levels]
        return lambda step, batch: cut(batch, lengths[bisect.bisect_right(first_steps, step) - 1])

    return OrderedDataset(
        samples,
        lambda batches: order_of(dataset, num_samples(samples), batches),
        comes_once=dataset.comes_once if isinstance(dataset, OrderedDataset) else True,
        make_transform=transform,
    )


def cut(batch: Any, length: int) -> Any:
    """Return a batch of sequences of at most this length."""
    longest = next((tensor.shape[1] for tensor in nested_tensors(batch) if tensor.dim() > 1), None)
    if longest is None:
        raise DataError("length_curriculum: the batch has no tensor with a second dimension, which could be cut.")
    if longest <= length:
        return batch

    def shortened(tensor: torch.Tensor) -> torch.Tensor:
        is_sequence = tensor.dim() > 1 and tensor.shape[1] == longest
        return tensor[:, :length].contiguous() if is_sequence else tensor

    return map_tensors(shortened, batch)
