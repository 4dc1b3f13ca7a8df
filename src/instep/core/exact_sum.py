"""A sum of floats that does not depend on their order.

Every finite double is an integer times a power of two. The integers of each power are added exactly, so any grouping
into batches and ranks gives the same sum. It is rounded once, at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

import numpy

_MANTISSA_BITS = 53
_HALF_BITS = 27


class ExactSum:
    """Adds doubles without rounding."""

    def __init__(self) -> None:
        self._sums: Counter[int] = Counter()
        self._odd = 0.0
        """The sum of NaNs and infinities, which are no integers."""

    def add(self, values: numpy.ndarray) -> None:
        """Add all elements."""
        flat = numpy.asarray(values, dtype=numpy.float64).reshape(-1)
        finite = numpy.isfinite(flat)
        if not finite.all():
            with numpy.errstate(invalid="ignore"):  # inf - inf is NaN, and that is the answer
                self._odd += float(flat[~finite].sum())
            flat = flat[finite]
        for start in range(0, len(flat), 1 << 20):  # so that the sums of halves below are exact as doubles
            self._add_finite(flat[start : start + (1 << 20)])

    def _add_finite(self, values: numpy.ndarray) -> None:
        fractions, exponents = numpy.frexp(values)
        integers = (fractions * 2.0**_MANTISSA_BITS).astype(numpy.int64)
        low_exponent = int(exponents.min())
        slots = exponents - low_exponent
        high, low = integers >> _HALF_BITS, integers & ((1 << _HALF_BITS) - 1)
        high_sums = numpy.bincount(slots, weights=high)
        low_sums = numpy.bincount(slots, weights=low)
        for slot in numpy.flatnonzero(numpy.bincount(slots)).tolist():
            self._sums[low_exponent + slot] += (int(high_sums[slot]) << _HALF_BITS) + int(low_sums[slot])

    def to_json(self) -> dict[str, int | str]:
        """Return the sum as plain values, to send to other processes."""
        return {"odd": repr(self._odd), **{str(exponent): total for exponent, total in self._sums.items()}}

    def merge(self, data: Mapping[str, int | str]) -> None:
        """Add the sum of another process."""
        for key, value in data.items():
            if key == "odd":
                self._odd += float(value)
            else:
                self._sums[int(key)] += int(value)

    def over(self, weight: ExactSum) -> float:
        """Divide by another sum, rounding once; 0/0 is NaN."""
        denominator = weight._fraction()
        if self._odd != 0 or weight._odd != 0 or not denominator:
            return float("nan") if self._odd != self._odd or not denominator or weight._odd != 0 else self._odd
        return float(self._fraction() / denominator)

    def _fraction(self) -> Fraction:
        return sum(
            (Fraction(total) * Fraction(2) ** (exponent - _MANTISSA_BITS) for exponent, total in self._sums.items()),
            Fraction(0),
        )
