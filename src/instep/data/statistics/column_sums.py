"""Sums and sums of squares of columns, without rounding.

[Note: Error-free squares]
Every double is cut into pieces: integers of at most 21 bits times powers of 2**22. Adding 1.5 * 2**52 times such a
power, and subtracting it again, rounds a whole block of doubles to multiples of the power; what is left over is exact,
too. The product of two pieces has at most 42 bits, and the sum of 2048 such products at most 53: it is exact as a
double, in whatever order it is computed. So Σx and Σx² are integers times powers of two, and any grouping of the rows
into batches and ranks gives the same ones. Mean and variance are quotients of integers, rounded once.

Most data needs three to five pieces, integers below a million one: the block is done when nothing is left over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from instep.core.errors import DataError
from instep.data.statistics.limbs import LIMB_BITS, Limbs

_ROWS = 2048
"""Rows whose products are added up as doubles."""
_BLOCK_ELEMENTS = 1 << 15
"""So that the pieces of a block stay in the processor's cache."""
_LARGE = 2.0**900
_SCALE_POWERS = 20
"""Very large and very small numbers are scaled by 2**440, so that no intermediate result overflows or is subnormal."""
_SCALE = 2.0 ** (LIMB_BITS * _SCALE_POWERS)
_LOW_POWER = -40
"""What is left over below 2**(-880) is scaled up first."""

Floats = npt.NDArray[np.float64]
Piece = tuple[int, Floats]


class Moments(NamedTuple):
    """Statistics of columns; a column without numbers has NaN."""

    counts: npt.NDArray[np.int64]
    """Numbers that are not NaN."""
    mean: Floats
    variance: Floats
    """Divided by the count, not by one less."""


class ColumnSums:
    """Counts, sums and sums of squares of the columns of arrays; NaN counts as missing."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.count: npt.NDArray[np.int64] | None = None
        self._sums, self._squares = Limbs(0), Limbs(0)

    @property
    def num_columns(self) -> int | None:
        """Their number; None: nothing was added yet."""
        return None if self.count is None else len(self.count)

    def add(self, block: npt.NDArray[Any]) -> None:
        """Add rows: a 2-D array of numbers."""
        self._begin(block.shape[1])
        assert self.count is not None
        self.num_rows += len(block)
        width = max(1, min(block.shape[1], _BLOCK_ELEMENTS // _ROWS))
        height = _ROWS * max(1, _BLOCK_ELEMENTS // _ROWS // width)
        for first_row in range(0, len(block), height):
            rows = block[first_row : first_row + height]
            for first in range(0, block.shape[1], width):
                self._add_block(_folded(rows[:, first : first + width]), first, len(rows))

    def _begin(self, num_columns: int) -> None:
        if self.count is None:
            self.count = np.zeros(num_columns, np.int64)
            self._sums, self._squares = Limbs(num_columns), Limbs(num_columns)
        check_columns(num_columns, len(self.count))

    def _add_block(self, block: Floats, first_column: int, num_rows: int) -> None:
        """Add a block (columns, parts, rows of a part), which may be changed."""
        assert self.count is not None
        columns = slice(first_column, first_column + len(block))
        self.count[columns] += num_rows
        largest = _largest(block)
        if np.isnan(largest):
            missing = np.isnan(block)
            self.count[columns] -= missing.sum(axis=(1, 2))
            block[missing] = 0.0
            largest = _largest(block)
        if largest == np.inf:
            refuse_infinity(block, first_column)
        if largest >= _LARGE:
            is_large = np.abs(block) >= _LARGE / _SCALE
            pieces = _cut(np.where(is_large, block, 0.0) / _SCALE, largest / _SCALE, _SCALE_POWERS)
            block = np.where(is_large, 0.0, block)
            pieces += _cut(block, _largest(block), 0)
        else:
            pieces = _cut(block, largest, 0)
        self._add_pieces(pieces, first_column)

    def _add_pieces(self, pieces: list[Piece], first_column: int) -> None:
        for number, (power, piece) in enumerate(pieces):
            self._sums.add(power, piece.sum(axis=2).astype(np.int64).sum(axis=1), first_column)
            for other_power, other in pieces[number:]:
                products = np.einsum("cpr,cpr->cp", piece, other).astype(np.int64)
                times = 1 if other is piece else 2
                self._squares.add(power + other_power, times * products.sum(axis=1), first_column)

    def moments(self) -> Moments:
        """Return mean and variance, each rounded once."""
        assert self.count is not None
        (exponent, sums), (exponent_2, squares) = self._sums.integers(), self._squares.integers()
        mean, variance = np.empty(len(sums)), np.empty(len(sums))
        low = min(exponent_2, 2 * exponent)
        for column, (count, total, square) in enumerate(zip(self.count.tolist(), sums, squares, strict=True)):
            mean[column] = _ratio(total, count, exponent)
            spread = count * (square << (exponent_2 - low)) - (total**2 << (2 * exponent - low))
            variance[column] = _ratio(spread, count**2, low)
        return Moments(self.count.copy(), mean, variance)

    def to_json(self) -> dict[str, Any]:
        """Return the sums as plain values: the same for the same rows, however they were grouped."""
        if self.count is None:
            return {}
        return {
            "num_rows": self.num_rows,
            "count": self.count.tolist(),
            "sums": [*self._sums.integers()],
            "squares": [*self._squares.integers()],
        }

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the sums of other rows, which `to_json` returned."""
        if not state:
            return
        self._begin(len(state["count"]))
        self.num_rows += int(state["num_rows"])
        assert self.count is not None
        self.count = self.count + np.array(state["count"], np.int64)
        self._sums.add_integers(*state["sums"])
        self._squares.add_integers(*state["squares"])


def check_columns(num_columns: int, expected: int) -> None:
    """Raise DataError if data has another number of columns than before."""
    if num_columns != expected:
        raise DataError(
            f"This data has {num_columns} columns, and there were {expected} before. Every batch must have the same "
            "columns."
        )


def _folded(rows: npt.NDArray[Any]) -> Floats:
    """Return rows as doubles by column, cut into parts of _ROWS rows; zeros fill the last part up."""
    num_rows, width = rows.shape
    if num_rows <= _ROWS:
        return np.array(rows.T, np.float64, order="C")[:, None]
    folded = np.zeros((width, -(-num_rows // _ROWS) * _ROWS))
    folded[:, :num_rows] = rows.T
    return folded.reshape(width, -1, _ROWS)


def _largest(block: Floats) -> float:
    """Return the largest absolute value; NaN if there is a NaN."""
    return float(np.maximum(block.max(), -block.min()))


def _cut(block: Floats, largest: float, powers: int) -> list[Piece]:
    """Cut doubles into integers times 2**(LIMB_BITS * power); the powers returned are higher by `powers`."""
    pieces: list[Piece] = []
    power = -(-(int(np.frexp(largest)[1]) + 1) // LIMB_BITS) - 1  # then the first integers have at most 21 bits
    rest = block
    while rest.any():
        if power < _LOW_POWER:
            rest = rest * _SCALE
            power, powers = power + _SCALE_POWERS, powers - _SCALE_POWERS
        rounding = 1.5 * 2.0 ** (52 + LIMB_BITS * power)
        piece = rest + rounding
        piece -= rounding
        rest = rest - piece
        piece *= 2.0 ** (-LIMB_BITS * power)
        pieces.append((power + powers, piece))
        power -= 1
    return pieces


def _ratio(numerator: int, denominator: int, exponent: int) -> float:
    """Return numerator / denominator * 2**exponent, rounded once; NaN for a denominator of 0."""
    if denominator == 0:
        return float("nan")
    try:
        return (numerator << max(0, exponent)) / (denominator << max(0, -exponent))
    except OverflowError:
        return float("inf") if numerator > 0 else float("-inf")


def refuse_infinity(columns: Floats, first_column: int) -> None:
    """Raise DataError if there is an infinity; the first axis is the columns."""
    infinite = np.flatnonzero(np.isinf(columns).reshape(len(columns), -1).any(axis=1))
    if len(infinite):
        raise DataError(
            f"Column {first_column + int(infinite[0])} of the data has an infinity. Replace it, or use NaN for what is "
            "missing."
        )
