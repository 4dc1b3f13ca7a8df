"""Which part of a split, or which fold, each sample belongs to. Pure: NumPy, no torch.

Keyed by the seed alone, so that every rank and every run finds the same parts.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from instep.data.order import Indices, permute
from instep.data.orders.keyed import permute_each


def first_part(seed: int, fraction: float, classes: Indices | None, num_samples: int) -> npt.NDArray[np.bool_]:
    """Return which samples are in the first part: round(fraction · N) of them, of each class its share within one."""
    if classes is None:
        count = int(_rounded(fraction, np.array([num_samples]))[0])
        # The smaller part is looked up; the other one is the rest.
        is_larger = 2 * count > num_samples
        places = np.arange(count, num_samples) if is_larger else np.arange(count)
        chosen = np.full(num_samples, is_larger)
        chosen[permute(f"{seed}/split", num_samples, places)] = not is_larger
        return chosen
    sizes = np.bincount(classes)
    # Rounded at the ends of classes: the differences add up, and a share that is a whole number stays what it is.
    ends = _rounded(fraction, np.cumsum(sizes))
    counts = np.diff(ends, prepend=0)
    return _places(f"{seed}/split", classes, sizes) < counts[classes]


def folds_of(seed: int, num_folds: int, classes: Indices | None, num_samples: int) -> Indices:
    """Return the fold of each sample; folds have the same number of samples of each class within one."""
    if classes is None:
        return permute(f"{seed}/folds", num_samples, np.arange(num_samples)) % num_folds
    sizes = np.bincount(classes)
    starts = np.cumsum(sizes) - sizes  # so that the folds have the same number of samples over all classes, too
    return (starts[classes] + _places(f"{seed}/folds", classes, sizes)) % num_folds


def first_groups(
    seed: int, fraction: float, groups: Indices, classes: Indices | None, num_samples: int
) -> npt.NDArray[np.bool_]:
    """Return which samples are in the first part, groups never divided: of each class as close as groups allow."""
    sizes = np.bincount(groups)
    strata = _strata(groups, classes)
    order = permute(f"{seed}/split groups", len(sizes), np.arange(len(sizes)))
    chosen = np.zeros(len(sizes), dtype=np.bool_)
    for stratum in range(int(strata.max()) + 1):
        own = order[strata[order] == stratum]
        ends = np.cumsum(sizes[own])
        # A group belongs to the first part if more than half of it lies before the border.
        chosen[own[ends - sizes[own] / 2 < fraction * ends[-1]]] = True
    assert len(groups) == num_samples
    return chosen[groups]


def folds_of_groups(seed: int, num_folds: int, groups: Indices, classes: Indices | None) -> Indices:
    """Return the fold of each sample, groups never divided: each goes to the fold that has the fewest samples yet."""
    sizes = np.bincount(groups)
    strata = _strata(groups, classes)
    order = permute(f"{seed}/fold groups", len(sizes), np.arange(len(sizes)))
    order = order[np.argsort(-sizes[order], kind="stable")]
    totals = [0] * num_folds
    folds = np.empty(len(sizes), dtype=np.int64)
    for stratum in range(int(strata.max()) + 1):
        heap = [(0, totals[fold], fold) for fold in range(num_folds)]
        heapq.heapify(heap)
        for group in order[strata[order] == stratum].tolist():
            count, total, fold = heapq.heappop(heap)
            folds[group] = fold
            totals[fold] += int(sizes[group])
            heapq.heappush(heap, (count + int(sizes[group]), total + int(sizes[group]), fold))
    return folds[groups]


def _places(key: str, classes: Indices, sizes: Indices) -> Indices:
    """Return the place of each sample in a permutation of its class."""
    by_class = np.argsort(classes, kind="stable")
    starts = np.cumsum(sizes) - sizes
    own = classes[by_class]
    places = np.empty_like(classes)
    places[by_class] = permute_each(key, own, sizes[own], np.arange(len(classes)) - starts[own])
    return places


def _strata(groups: Indices, classes: Indices | None) -> Indices:
    """Return the most frequent class of each group; without classes, 0."""
    num_groups = int(groups.max()) + 1
    if classes is None:
        return np.zeros(num_groups, dtype=np.int64)
    num_classes = int(classes.max()) + 1
    pairs, counts = np.unique(groups * num_classes + classes, return_counts=True)
    rarest_first = np.argsort(counts, kind="stable")
    strata = np.empty(num_groups, dtype=np.int64)
    strata[pairs[rarest_first] // num_classes] = pairs[rarest_first] % num_classes  # the last entry counts
    return strata


def _rounded(fraction: float, counts: Indices) -> Indices:
    rounded: Indices = np.floor(fraction * counts + 0.5).astype(np.int64)
    return rounded
