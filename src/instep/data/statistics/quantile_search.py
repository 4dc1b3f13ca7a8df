"""Exact quantiles of columns that do not fit into memory, by a few passes over the data.

[Note: Exact quantiles]
The bits of a double, read as an integer, have the order of the doubles (those of negative ones are flipped). A pass
counts, for each column, how many numbers begin with which bits; that says with which bits the numbers at the wanted
ranks begin, and the next pass looks at the numbers that begin so, and counts by the bits after those. When few are
left, a last pass collects them. Counts of several processes are added up, so that the result is exact, and the same at
any number of processes. A sketch (KLL, t-digest) needs one pass only, but it has an error, and the result depends on
how the data was split. Two or three passes are enough for most data.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from instep.data.statistics.column_sums import Floats, check_columns, refuse_infinity

_MAX_BINS = 1 << 22
"""Counters of a pass, over all columns."""
_MAX_BITS = 12
_MAX_COLLECTED = 1 << 16
"""Numbers that the last pass may collect, over all columns."""
_GROUP_ELEMENTS, _GROUP_ROWS = 1 << 17, 1 << 13
"""Numbers that are counted at a time, and rows: more than a column has counters, and few enough for the cache."""
_SIGN = np.int64(-(2**63))

Keys = npt.NDArray[np.int64]


def keys_of(values: Floats) -> Keys:
    """Return integers that have the order of the doubles; -0.0 and 0.0 have one key. There must be no NaN."""
    bits = (values + 0.0).view(np.int64)
    return bits ^ ((bits >> 63) & ~_SIGN)


def values_of(keys: Keys) -> Floats:
    """Return the doubles of keys."""
    return (keys ^ ((keys >> 63) & ~_SIGN)).view(np.float64)


class QuantileSearch:
    """Finds quantiles of columns, with linear interpolation as in NumPy; NaN counts as missing.

    While `is_done` is false: add all the data to a `new_pass`, merge those of all processes, and give it to `take`.
    """

    def __init__(self, quantiles: Sequence[float]) -> None:
        self.quantiles = np.asarray(quantiles, np.float64)
        self.is_done = False
        self.values: Floats = np.empty((0, 0))
        """The quantiles, (quantile, column); NaN for a column without numbers."""
        self._plan: SearchPass | None = None

    def new_pass(self) -> SearchPass:
        """Return what the next pass adds the data to."""
        if self._plan is None:
            return SearchPass()
        return SearchPass(self._plan.shift, self._plan.prefixes, self._plan.bits, self._plan.collects)

    def take(self, made: SearchPass) -> None:
        """Take a pass over all the data, and decide what the next one looks for."""
        if self._plan is None:
            self._begin(made)
        if made.collects:
            self._keys = [made.sorted_keys(column)[where] for column, where in self._places]
            self._finish()
            return
        prefixes: list[dict[int, int]] = [{} for _ in range(made.num_columns)]
        num_left = 0
        for number, (column, rank) in enumerate(self._targets):
            prefix, rank, count = made.find(column, self._found[number], rank)
            self._targets[number], self._found[number] = (column, rank), prefix
            if prefix not in prefixes[column]:
                prefixes[column][prefix] = count
                num_left += count
        shift = made.shift - made.bits
        if shift <= int(made.zeros.min(initial=64)):  # the bits after these are known
            self._keys = [prefix << shift if prefix >= 0 else ((prefix + 1) << shift) - 1 for prefix in self._found]
            self._finish()
            return
        self._plan = SearchPass(shift, [[*each] for each in prefixes], made.bits, num_left <= _MAX_COLLECTED)
        self._plan.zeros = made.zeros
        self._places = self._places_of(prefixes)

    def _begin(self, first: SearchPass) -> None:
        """Say which ranks are wanted, two for each quantile of each column that has numbers."""
        self._counts = first.counts_by_column()
        self._targets: list[tuple[int, int]] = []
        for column, count in enumerate(self._counts.tolist()):
            if count:
                low = np.floor(self.quantiles * (count - 1)).astype(np.int64)
                ranks = np.stack([low, np.minimum(low + 1, count - 1)], axis=1)
                self._targets += [(column, int(rank)) for rank in ranks.reshape(-1)]
        self._found = [0] * len(self._targets)

    def _places_of(self, prefixes: list[dict[int, int]]) -> list[tuple[int, int]]:
        """Return where each target is among the sorted numbers that a pass collects of its column."""
        places = []
        for (column, rank), own in zip(self._targets, self._found, strict=True):
            before = sum(count for prefix, count in prefixes[column].items() if prefix < own)
            places.append((column, before + rank))
        return places

    def _finish(self) -> None:
        """Interpolate between the two numbers of each quantile."""
        numbers = values_of(np.array(self._keys, np.int64)).reshape(-1, len(self.quantiles), 2)
        has_numbers = np.flatnonzero(self._counts)
        self.values = np.full((len(self.quantiles), len(self._counts)), np.nan)
        virtual = self.quantiles[:, None] * (self._counts[has_numbers] - 1)
        weight = virtual - np.floor(virtual)
        low, high = numbers[:, :, 0].T, numbers[:, :, 1].T
        with np.errstate(over="ignore", invalid="ignore"):
            step = high - low
            between = np.where(weight >= 0.5, high - step * (1 - weight), low + step * weight)
        self.values[:, has_numbers] = np.where(step == 0, low, between)
        self.is_done = True


class SearchPass:
    """Counts of one pass: of the numbers that begin with one of some prefixes, by the bits after it."""

    def __init__(
        self,
        shift: int = 64,
        prefixes: list[list[int]] | None = None,
        bits: int = 0,
        collects: bool = False,
    ) -> None:
        self.shift = shift
        """How many bits follow those that are known."""
        self.prefixes = prefixes
        self.bits, self.collects = bits, collects
        self.zeros: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """How many of the last bits of every number of a column are zero; filled by the first pass."""
        self._all_bits: Keys = np.zeros(0, np.int64)
        self._counts: npt.NDArray[np.int64] = np.zeros((0, 0, 0), np.int64)
        """(prefix of the column, column, next bits)."""
        self._collected: list[list[Keys]] = []
        if prefixes is not None:
            self._begin(len(prefixes))

    @property
    def num_columns(self) -> int:
        """Their number; 0 before the first block."""
        return len(self._all_bits)

    def _begin(self, num_columns: int) -> None:
        if self.num_columns:
            check_columns(num_columns, self.num_columns)
            return
        self._all_bits = np.zeros(num_columns, np.int64)
        self.zeros = np.zeros(num_columns, np.int64)
        if self.prefixes is None:
            self.bits = min(_MAX_BITS, max(6, (_MAX_BINS // num_columns).bit_length() - 1))
            self.prefixes = [[0]] * num_columns
        self.bits = min(self.bits, self.shift)
        self._slots = [[] for _ in range(max(map(len, self.prefixes), default=0))]
        for column, own in enumerate(self.prefixes):
            for slot, prefix in enumerate(own):
                self._slots[slot].append((column, prefix))
        if self.collects:
            self._collected = [[] for _ in range(num_columns)]
        else:
            self._counts = np.zeros((len(self._slots), num_columns, 1 << self.bits), np.int64)

    _slots: list[list[tuple[int, int]]]

    def add(self, block: npt.NDArray[Any]) -> None:
        """Count rows: a 2-D array of numbers."""
        self._begin(block.shape[1])
        width = max(1, min(block.shape[1], _GROUP_ELEMENTS // _GROUP_ROWS))
        height = max(_GROUP_ROWS, _GROUP_ELEMENTS // width)
        for first_row in range(0, len(block), height):
            rows = block[first_row : first_row + height]
            for first in range(0, block.shape[1], width):
                columns = np.array(rows[:, first : first + width].T, np.float64, order="C")
                is_missing = ~np.isfinite(columns)
                if not is_missing.any():
                    self._add_group(keys_of(columns), None, first)
                    continue
                refuse_infinity(columns, first)
                columns[is_missing] = 0.0
                self._add_group(keys_of(columns), ~is_missing, first)

    def _add_group(self, keys: Keys, present: npt.NDArray[np.bool_] | None, first: int) -> None:
        assert self.prefixes is not None
        columns = np.arange(first, first + len(keys))
        if self.shift == 64:
            raw = keys ^ ((keys >> 63) & ~_SIGN)
            self._all_bits[columns] |= np.bitwise_or.reduce(raw, axis=1)
            self._count(0, first, keys, present)
            return
        leading = keys >> self.shift
        for slot in range(len(self._slots)):
            has = np.array([slot < len(self.prefixes[column]) for column in columns])
            wanted = [self.prefixes[column][slot] if slot < len(self.prefixes[column]) else 0 for column in columns]
            matches = leading == np.array(wanted)[:, None]
            matches &= has[:, None]
            if present is not None:
                matches &= present
            if self.collects:
                for row, column in enumerate(columns.tolist()):
                    self._collected[column].append(keys[row][matches[row]])
            else:
                self._count(slot, first, keys, matches)

    def _count(self, slot: int, first: int, keys: Keys, chosen: npt.NDArray[np.bool_] | None) -> None:
        size = 1 << self.bits
        bins = (keys >> (self.shift - self.bits)) & (size - 1)
        bins += (np.arange(len(keys)) * size)[:, None]
        flat = bins.reshape(-1) if chosen is None else bins[chosen]
        counts = np.bincount(flat, minlength=len(keys) * size).reshape(len(keys), size)
        self._counts[slot, first : first + len(keys)] += counts

    def counts_by_column(self) -> npt.NDArray[np.int64]:
        """Return how many numbers each column has, after the first pass."""
        for column, bits in enumerate(self._all_bits.tolist()):
            self.zeros[column] = 64 if bits == 0 else (bits & -bits).bit_length() - 1
        return self._counts[0].sum(axis=1)

    def find(self, column: int, prefix: int, rank: int) -> tuple[int, int, int]:
        """Return with which bits the number of a rank begins, its rank among those that do, and their number."""
        assert self.prefixes is not None
        counts = self._counts[self.prefixes[column].index(prefix), column]
        if self.shift == 64:  # the first bit is the sign: negative numbers come first
            counts = np.roll(counts, len(counts) // 2)
        until = counts.cumsum()
        place = int(np.searchsorted(until, rank, side="right"))
        before = int(until[place] - counts[place])
        longer = place - len(counts) // 2 if self.shift == 64 else (prefix << self.bits) + place
        return longer, rank - before, int(counts[place])

    def sorted_keys(self, column: int) -> list[int]:
        """Return what was collected of a column, in order."""
        collected = np.sort(np.concatenate([np.zeros(0, np.int64), *self._collected[column]]))
        return [int(key) for key in collected]

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values, to send to other processes."""
        if not self.num_columns:
            return {}
        state: dict[str, Any] = {"num_columns": self.num_columns, "all_bits": self._all_bits.tolist()}
        if self.collects:
            return {**state, "collected": [self.sorted_keys(column) for column in range(self.num_columns)]}
        return {**state, "counts": _packed(self._counts)}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the counts of other rows, which `to_json` returned."""
        if not state:
            return
        self._begin(int(state["num_columns"]))
        self._all_bits |= np.array(state["all_bits"], np.int64)
        if self.collects:
            for own, keys in zip(self._collected, state["collected"], strict=True):
                own.append(np.array(keys, np.int64))
        else:
            self._counts += _unpacked(state["counts"]).reshape(self._counts.shape)


def _packed(counts: npt.NDArray[np.int64]) -> str:
    """Return counts as a short text: most of them are 0."""
    return base64.b64encode(zlib.compress(counts.tobytes(), 1)).decode()


def _unpacked(text: str) -> npt.NDArray[np.int64]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.int64)
