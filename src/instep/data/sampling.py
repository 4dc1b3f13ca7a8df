"""Which samples are trained on, how often, and which of them together: weights, classes, groups, lengths.

Ranks: all, alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from instep.core.errors import SpecError
from instep.data.batch_plan import BatchSpec
from instep.data.loader import num_samples as count_samples
from instep.data.order import Indices, Order
from instep.data.ordered import OrderedDataset
from instep.data.orders.buckets import BucketOrder, TokenOrder
from instep.data.orders.grouped import GroupedOrder
from instep.data.orders.weighted import BalancedOrder, WeightedOnceOrder, WeightedOrder
from instep.data.stream import is_stream


def weighted(
    dataset: Any, weights: npt.ArrayLike, num_samples: int | None = None, replacement: bool = True
) -> OrderedDataset:
    """Return a dataset whose samples are drawn with probabilities proportional to `weights`.

    `num_samples`: in an epoch; by default as many as the dataset has. Without `replacement` a sample comes at most
    once in an epoch, and the default is every sample whose weight is not zero.
    """
    checked = checked_weights(weights, [f"sample {i}" for i in range(3)], "weights")
    _check_length("weights", len(checked), dataset)
    num_nonzero = int(np.count_nonzero(checked))
    check_num_samples(num_samples)
    if not replacement and num_samples is not None and num_samples > num_nonzero:
        raise SpecError(
            f"num_samples={num_samples} without replacement, but only {num_nonzero} of {len(checked)} weights are not "
            f"zero, and a sample comes at most once. Use num_samples <= {num_nonzero}, or replacement=True."
        )
    kind = WeightedOrder if replacement else WeightedOnceOrder
    count = num_samples or (len(checked) if replacement else num_nonzero)
    return OrderedDataset(dataset, lambda batches: kind(batches.seed, checked, count), comes_once=False)


def balanced(dataset: Any, labels: npt.ArrayLike, num_samples: int | None = None) -> OrderedDataset:
    """Return a dataset in which every class comes equally often, and every sample of a class, too.

    `labels`: the class of each sample, numbers or strings. `num_samples`: in an epoch; by default as many as the
    dataset has.
    """
    classes = numbers_of("labels", labels, dataset)
    check_num_samples(num_samples)
    count = num_samples or len(classes)
    return OrderedDataset(dataset, lambda batches: BalancedOrder(batches.seed, classes, count), comes_once=False)


def grouped(dataset: Any, groups: npt.ArrayLike) -> OrderedDataset:
    """Return a dataset in which the samples of a group stand one after the other; `groups`: that of each sample."""
    numbers = numbers_of("groups", groups, dataset)
    return OrderedDataset(dataset, lambda batches: GroupedOrder(batches.seed, numbers))


def bucketed(dataset: Any, lengths: npt.ArrayLike) -> OrderedDataset:
    """Return a dataset whose batches have samples of similar lengths; `lengths`: that of each sample, in tokens.

    With --batch-tokens a batch has as many samples as fit into that number of tokens, padding included. With
    --shuffle-window a bucket has about so many samples.
    """
    checked = _checked_lengths(lengths, dataset)

    def make_order(batches: BatchSpec) -> Order:
        if batches.batch_tokens is None:
            return BucketOrder(batches.seed, checked, batches.batch_size, batches.shuffle_window)
        longest = int(checked.argmax())
        if checked[longest] > batches.batch_tokens:
            raise SpecError(
                f"batch_tokens={batches.batch_tokens} is less than the {checked[longest]} tokens of sample {longest}, "
                "the longest. Use more tokens, or cut or leave out long samples."
            )
        return TokenOrder(batches.seed, checked, batches.batch_tokens, batches.shuffle_window)

    return OrderedDataset(dataset, make_order)


def checked_weights(weights: npt.ArrayLike, names: list[str], what: str) -> npt.NDArray[np.float64]:
    """Return weights as an array; raise SpecError for those that cannot be. `names` of the first entries."""
    array = np.asarray(weights, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise SpecError(f"{what} have the shape {array.shape}. Give one number for each.")
    wrong = np.flatnonzero(~(array >= 0) | np.isinf(array))
    if wrong.size:
        where = names[wrong[0]] if wrong[0] < len(names) else f"sample {wrong[0]}"
        raise SpecError(f"{what}: {array[wrong[0]]} for {where} is no weight. Use numbers that are not negative.")
    if not array.any():
        raise SpecError(f"{what}: all {len(array)} are zero, so there is nothing to draw. Give at least one above 0.")
    with np.errstate(over="ignore"):
        has_sum = np.isfinite(array.sum())
    return array if has_sum else array / array.max()


def numbers_of(what: str, labels: npt.ArrayLike, dataset: Any) -> Indices:
    """Return the number of each sample's class or group, from 0 without gaps; raise SpecError for wrong labels."""
    array = np.asarray(labels)
    if array.ndim != 1:
        raise SpecError(f"{what} have the shape {array.shape}. Give one for each sample.")
    _check_length(what, len(array), dataset)
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise SpecError(f"{what}: that of sample {int(np.flatnonzero(np.isnan(array))[0])} is NaN. Give one to each.")
    try:
        _, numbers = np.unique(array, return_inverse=True)
    except TypeError as error:
        raise SpecError(f"{what} cannot be sorted: {error}. Give numbers or strings, not both.") from None
    return numbers.astype(np.int64)


def _checked_lengths(lengths: npt.ArrayLike, dataset: Any) -> Indices:
    given = np.asarray(lengths)
    if given.ndim != 1 or given.dtype.kind not in "iuf":
        raise SpecError(f"lengths have the shape {given.shape} and dtype {given.dtype}. Give one integer per sample.")
    _check_length("lengths", len(given), dataset)
    wrong = np.flatnonzero(~(given >= 0) | (given != np.floor(given)) | ~(given < 2**53))
    if wrong.size:
        raise SpecError(f"lengths: {given[wrong[0]]} of sample {wrong[0]} is no number of tokens. Use whole numbers.")
    return given.astype(np.int64)


def _check_length(what: str, count: int, dataset: Any) -> None:
    """Raise SpecError unless there is one entry for each sample."""
    check_indexed(dataset, what)
    expected = {count_samples(dataset)}
    if isinstance(dataset, list):  # tensors may be columns or, with a collate, samples
        expected.add(len(dataset))
    if count not in expected:
        raise SpecError(
            f"{what} has {count} entries and the dataset {min(expected)} samples. Give one for each sample."
        )


def check_num_samples(num_samples: int | None) -> None:
    """Raise SpecError for an epoch without samples."""
    if num_samples is not None and num_samples < 1:
        raise SpecError(f"num_samples={num_samples} leaves nothing to train on. Use at least 1.")


def check_indexed(dataset: Any, what: str) -> None:
    """Raise SpecError for a stream, whose samples have no index."""
    if is_stream(dataset):
        raise SpecError(
            f"{what}: the dataset ({type(dataset).__name__}) is a stream, which can only be read from its beginning to "
            "its end. Give one with __len__ and __getitem__."
        )
