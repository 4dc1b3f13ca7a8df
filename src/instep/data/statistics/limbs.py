"""Integers of any size, one per column, that many others are added to: a few int64 digits each.

Column c holds the sum over b of `digits[b, c] * 2**(LIMB_BITS * (low + b))`. Adding is a NumPy operation over all
columns, and nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LIMB_BITS = 22
_BASE = 1 << LIMB_BITS
_MAX_ADDS = 1 << 20
"""Each addition adds less than 2**42 to a digit, so that this many fit into an int64."""

Integers = npt.NDArray[np.int64]


class Limbs:
    """A sum of integers times powers of 2**LIMB_BITS for each column."""

    def __init__(self, num_columns: int) -> None:
        self._low = 0
        self._digits = np.zeros((0, num_columns), np.int64)
        self._num_adds = 0

    def add(self, power: int, values: Integers, first_column: int = 0) -> None:
        """Add `values * 2**(LIMB_BITS * power)` to as many columns as there are values, from the first one on."""
        self._make_room(power, power + 1)
        columns = slice(first_column, first_column + len(values))
        row = power - self._low
        self._digits[row, columns] += values & (_BASE - 1)
        self._digits[row + 1, columns] += values >> LIMB_BITS
        self._num_adds += 1
        if self._num_adds >= _MAX_ADDS:
            self._carry()

    def integers(self) -> tuple[int, list[int]]:
        """Return an exponent and an integer for each column, whose product with 2**exponent is its sum.

        Equal sums give equal exponents and integers, whatever they were added up from.
        """
        self._carry()
        used = np.flatnonzero(self._digits.any(axis=1))
        if not len(used):
            return 0, [0] * self._digits.shape[1]
        totals = np.zeros(self._digits.shape[1], object)
        for digits in self._digits[used[0] :][::-1]:
            totals = totals * _BASE + digits.astype(object)
        return LIMB_BITS * (self._low + int(used[0])), [int(total) for total in totals]

    def add_integers(self, exponent: int, integers: Sequence[int]) -> None:
        """Add what `integers` returned."""
        power, rest = exponent // LIMB_BITS, np.array([*integers, None], object)[:-1]  # None: no int64 array
        while np.any(rest != 0):
            self.add(power, (rest & (_BASE - 1)).astype(np.int64))
            power, rest = power + 1, rest >> LIMB_BITS
            if np.all((rest >= -_BASE) & (rest < _BASE)):  # a shift alone would never end for negative ones
                self.add(power, rest.astype(np.int64))
                return

    def _make_room(self, low: int, high: int) -> None:
        """Extend the digits to the powers low..high."""
        if not len(self._digits):
            self._low = low
        below = max(0, self._low - low)
        above = max(0, high + 1 - self._low - len(self._digits))
        if below or above:
            self._digits = np.pad(self._digits, ((below, above), (0, 0)))
            self._low -= below

    def _carry(self) -> None:
        """Make every digit but the highest one lie in 0..2**LIMB_BITS - 1."""
        for row in range(len(self._digits) - 1):
            self._digits[row + 1] += self._digits[row] >> LIMB_BITS
            self._digits[row] &= _BASE - 1
        if len(self._digits) and np.any(np.abs(self._digits[-1]) >= _BASE):
            self._digits = np.pad(self._digits, ((0, 3), (0, 0)))  # an int64 has three digits
            self._carry()
        self._num_adds = 0
