"""Parts of a dataset that have no sample in common: splits, and the folds of a cross-validation.

Ranks: all, alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Subset

from instep.core.errors import SpecError
from instep.data.by_rows import by_rows
from instep.data.columns import as_columns
from instep.data.dataset import BatchDataset, SelectedDataset
from instep.data.loader import num_samples as count_samples
from instep.data.order import Indices
from instep.data.ordered import OrderedDataset
from instep.data.orders.partition import first_groups, first_part, folds_of, folds_of_groups
from instep.data.sampling import check_indexed, numbers_of

Labels = npt.ArrayLike | str | None
"""That of each sample, or the name of a column."""


def split(dataset: Any, fraction: float, by: Labels = None, *, groups: Labels = None, seed: int = 0) -> tuple[Any, Any]:
    """Return two parts of a dataset, the first with this fraction of the samples; the same two on every rank.

    `by`: the class of each sample; both parts then have the same share of each class. `groups`: the group of each
    sample; no group is divided. Both parts keep the samples in the dataset's order.
    """
    total = _count(dataset, "split")
    if not 0 < fraction < 1:
        raise SpecError(
            f"fraction={fraction} leaves one of two parts empty. Use a number between 0 and 1, such as 0.9."
        )
    classes, numbers = _numbers("by", by, dataset), _numbers("groups", groups, dataset)
    if numbers is None:
        first = first_part(seed, fraction, classes, total)
    else:
        first = first_groups(seed, fraction, numbers, classes, total)
    for is_empty, which in ((not first.any(), "first"), (first.all(), "second")):
        if is_empty:
            entries = f"{total} samples" if numbers is None else f"{total} samples in {int(numbers.max()) + 1} groups"
            raise SpecError(f"fraction={fraction} of {entries} leaves the {which} part empty. Use another fraction.")
    return _chosen(dataset, np.flatnonzero(first)), _chosen(dataset, np.flatnonzero(~first))


def folds(dataset: Any, k: int, by: Labels = None, *, groups: Labels = None, seed: int = 0) -> list[tuple[Any, Any]]:
    """Return the k pairs (training part, test part) of a cross-validation; every sample is in one test part.

    `by`, `groups` and `seed` are as in `split`.
    """
    total = _count(dataset, "folds")
    classes, numbers = _numbers("by", by, dataset), _numbers("groups", groups, dataset)
    most = total if numbers is None else int(numbers.max()) + 1
    if not 2 <= k <= most:
        what = "samples" if numbers is None else "groups"
        raise SpecError(f"k={k} folds of {most} {what} are not possible. Use 2 to {most}.")
    fold = folds_of(seed, k, classes, total) if numbers is None else folds_of_groups(seed, k, numbers, classes)
    if empty := sorted(set(range(k)) - set(np.unique(fold).tolist())):
        raise SpecError(f"k={k}: fold {empty[0]} would have no samples. Use fewer folds, or leave out `by`.")
    return [
        (_chosen(dataset, np.flatnonzero(fold != number)), _chosen(dataset, np.flatnonzero(fold == number)))
        for number in range(k)
    ]


def _count(dataset: Any, what: str) -> int:
    if isinstance(dataset, OrderedDataset):
        raise SpecError(
            f"{what}: this dataset has an order of its own (weighted, grouped, bucketed, mix, curriculum), which "
            f"belongs to all its samples. Use {what} on the samples first, and give each part an order afterwards."
        )
    check_indexed(dataset, what)
    return count_samples(dataset)


def _numbers(what: str, labels: Labels, dataset: Any) -> Indices | None:
    if isinstance(labels, str):
        if not isinstance(dataset, Mapping) and not hasattr(dataset, "column_names"):
            raise SpecError(
                f"{what}={labels!r} names a column, and a {type(dataset).__name__} has none. Give an array."
            )
        try:
            labels = np.asarray(dataset[labels])
        except KeyError:
            columns = list(getattr(dataset, "column_names", dataset))
            raise SpecError(f"{what}={labels!r} is none of the columns {columns}.") from None
    return None if labels is None else numbers_of(what, labels, dataset)


def _chosen(dataset: Any, indices: Indices) -> Any:
    """Return some samples of a dataset; read as the dataset is."""
    if isinstance(dataset, BatchDataset) or as_columns(dataset, samples_wanted=True) is not None:
        return SelectedDataset(by_rows(dataset), indices)
    return Subset(dataset, indices)  # type: ignore[arg-type]
