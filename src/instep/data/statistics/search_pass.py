"""One pass of a search for quantiles: [Note: Exact quantiles]."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from instep.data.statistics.column_sums import Floats, check_columns, refuse_infinity

_MAX_BINS, _MAX_BITS = 1 << 22, 12
"""Counters of a pass, over all columns; bits that it looks at."""
_GROUP_ELEMENTS, _GROUP_ROWS = 1 << 17, 1 << 13
"""Numbers that are counted at a time, and rows: more than a column has counters, and few enough for the cache."""
_ALL_BITS = np.int64(2**63 - 1)
"""But the sign."""

# The bits of doubles, read as integers that have the order of the doubles; -0.0 and 0.0 have one.
Keys = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_] | None


def values_of(keys: Keys) -> Floats:
    """Return the doubles of keys."""
    bits: Keys = keys ^ ((keys >> 63) & _ALL_BITS)
    return bits.view(np.float64)


class SearchPlan(NamedTuple):
    """What a pass looks for."""

    shift: int = 64
    """How many bits follow those that are known."""
    prefixes: tuple[tuple[int, ...], ...] = ()
    """The known bits, of each column; empty in the first pass."""
    collects: bool = False
    """Whether it collects the numbers that begin with the prefixes, and does not count them."""

    @property
    def is_first(self) -> bool:
        """Whether no bits are known."""
        return self.shift == 64


class _Buffers:
    """Memory for the numbers that are looked at: new memory for each group, from the system, took 40 % of a pass."""

    def __init__(self) -> None:
        self._integers = np.empty((3, _GROUP_ELEMENTS), np.int64)
        self._booleans = np.empty((2, _GROUP_ELEMENTS), np.bool_)

    def integers(self, number: int, shape: tuple[int, int]) -> Keys:
        """Return one of three arrays of a shape."""
        return self._integers[number, : shape[0] * shape[1]].reshape(shape)

    def booleans(self, number: int, shape: tuple[int, int]) -> npt.NDArray[np.bool_]:
        """Return one of two arrays of a shape."""
        return self._booleans[number, : shape[0] * shape[1]].reshape(shape)


class SearchPass:
    """Counts of the numbers that begin with one of some prefixes, by the bits after it."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        self._prefixes: tuple[tuple[int, ...], ...] = ()
        self._num_slots = 0
        """The most prefixes that a column has."""
        self.bits = 0
        """How many bits it looks at."""
        self._seen_bits: Keys = np.zeros(0, np.int64)
        """Bits that are set in any number, by column; of the first pass."""
        self._counts: Keys = np.zeros((0, 0, 0), np.int64)
        """By number of the prefix, column, and next bits."""
        self._collected: list[list[Keys]] = []
        self._buffers: _Buffers | None = None

    def _begin(self, num_columns: int) -> None:
        if self._prefixes:
            check_columns(num_columns, len(self._prefixes))
            return
        self._prefixes = self._plan.prefixes or ((0,),) * num_columns
        check_columns(num_columns, len(self._prefixes))
        self._num_slots = max(map(len, self._prefixes))
        self.bits = min(self._plan.shift, _MAX_BITS, max(6, (_MAX_BINS // num_columns).bit_length() - 1))
        self._seen_bits = np.zeros(num_columns, np.int64)
        self._collected = [[] for _ in range(num_columns)]
        if not self._plan.collects:
            self._counts = np.zeros((self._num_slots, num_columns, 1 << self.bits), np.int64)

    def add(self, block: npt.NDArray[Any]) -> None:
        """Count rows: a 2-D array of numbers."""
        self._begin(block.shape[1])
        self._buffers = self._buffers or _Buffers()
        width = max(1, min(block.shape[1], _GROUP_ELEMENTS // _GROUP_ROWS))
        height = _GROUP_ELEMENTS // width
        for first_row in range(0, len(block), height):
            rows = block[first_row : first_row + height]
            for first in range(0, block.shape[1], width):
                self._add_columns(rows[:, first : first + width].T, first, self._buffers)

    def _add_columns(self, given: npt.NDArray[Any], first: int, buffers: _Buffers) -> None:
        """Add the numbers of some columns, from the first one on."""
        shape = (given.shape[0], given.shape[1])
        keys = buffers.integers(0, shape)
        columns: Floats = keys.view(np.float64)
        np.copyto(columns, given, casting="unsafe")
        is_finite = np.isfinite(columns, out=buffers.booleans(0, shape))
        present: Chosen = None if is_finite.all() else is_finite
        if present is not None:
            refuse_infinity(columns, first)
            columns[~present] = 0.0
        columns += 0.0  # which turns -0.0 into 0.0
        if self._plan.is_first:
            self._seen_bits[first : first + len(keys)] |= np.bitwise_or.reduce(keys, axis=1)
        sign = np.right_shift(keys, 63, out=buffers.integers(1, shape))
        sign &= _ALL_BITS
        keys ^= sign
        if self._plan.is_first:
            self._count(0, first, keys, present, buffers)
        else:
            self._add_matching(keys, present, first, buffers)

    def _add_matching(self, keys: Keys, present: Chosen, first: int, buffers: _Buffers) -> None:
        """Count or collect the keys that begin with one of the prefixes."""
        shape = (keys.shape[0], keys.shape[1])
        leading = np.right_shift(keys, self._plan.shift, out=buffers.integers(1, shape))
        own = self._prefixes[first : first + len(keys)]
        for slot in range(self._num_slots):
            prefixes = np.array([each[slot] if slot < len(each) else 0 for each in own], np.int64)
            matches = np.equal(leading, prefixes[:, None], out=buffers.booleans(1, shape))
            matches &= np.array([slot < len(each) for each in own])[:, None]
            if present is not None:
                matches &= present
            if not self._plan.collects:
                self._count(slot, first, keys, matches, buffers)
                continue
            for row in range(len(keys)):
                self._collected[first + row].append(keys[row][matches[row]])

    def _count(self, slot: int, first: int, keys: Keys, chosen: Chosen, buffers: _Buffers) -> None:
        size = 1 << self.bits
        shape = (keys.shape[0], keys.shape[1])
        bins = np.right_shift(keys, self._plan.shift - self.bits, out=buffers.integers(2, shape))
        bins &= size - 1
        bins += (np.arange(len(keys)) * size)[:, None]
        flat = bins.reshape(-1) if chosen is None else bins[chosen]
        counts = np.bincount(flat, minlength=len(keys) * size).reshape(len(keys), size)
        self._counts[slot, first : first + len(keys)] += counts

    def counts_by_column(self) -> Keys:
        """Return how many numbers each column has; of the first pass."""
        counts: Keys = self._counts[0].sum(axis=1)
        return counts

    @property
    def num_zeros(self) -> int:
        """How many of the last bits of all numbers are zero; of the first pass."""
        seen = int(np.bitwise_or.reduce(self._seen_bits))
        return 64 if seen == 0 else (seen & -seen).bit_length() - 1

    def find(self, column: int, prefix: int, rank: int) -> tuple[int, int, int]:
        """Return with which bits the number of a rank begins, its rank among those that do, and their number."""
        counts = self._counts[self._prefixes[column].index(prefix), column]
        half = len(counts) // 2 if self._plan.is_first else 0
        counts = np.roll(counts, half)  # the first bit is the sign: negative numbers come first
        until = counts.cumsum()
        place = int(np.searchsorted(until, rank, side="right"))
        before = int(until[place] - counts[place])
        return (prefix << self.bits) + place - half, rank - before, int(counts[place])

    def sorted_keys(self, column: int) -> Keys:
        """Return what was collected of a column, in order."""
        return np.sort(self._keys_in(column))

    def _keys_in(self, column: int) -> Keys:
        return np.concatenate([np.zeros(0, np.int64), *self._collected[column]])

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values, to send to other processes."""
        if not self._prefixes:
            return {}
        state: dict[str, Any] = {"num_columns": len(self._prefixes), "seen_bits": self._seen_bits.tolist()}
        if self._plan.collects:
            return {**state, "collected": [_packed(self._keys_in(column)) for column in range(len(self._prefixes))]}
        return {**state, "counts": _packed(_shortest(self._counts), level=1)}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the counts of other rows, which `to_json` returned."""
        if not state:
            return
        self._begin(int(state["num_columns"]))
        self._seen_bits |= np.array(state["seen_bits"], np.int64)
        if not self._plan.collects:
            self._counts += _unpacked(state["counts"]).reshape(self._counts.shape).astype(np.int64)
            return
        for own, keys in zip(self._collected, state["collected"], strict=True):
            own.append(_unpacked(keys))


def _shortest(counts: Keys) -> npt.NDArray[Any]:
    """Return counts in the shortest dtype that holds them: most of them are small, or 0."""
    return counts.astype(np.min_scalar_type(int(counts.max())))


def _packed(numbers: npt.NDArray[Any], level: int = 0) -> list[str]:
    """Return numbers as a text, and their dtype; `level`: how much to compress."""
    return [numbers.dtype.name, base64.b64encode(zlib.compress(numbers.tobytes(), level)).decode()]


def _unpacked(packed: list[str]) -> npt.NDArray[Any]:
    dtype, text = packed
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)
