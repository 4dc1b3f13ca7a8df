"""Numbers that grow with a run, and their down-sampled form for charts. Pure: no files, no network."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_BUCKETS = 1024
"""So many buckets, of two points each, are as much as a chart can show."""
_NAN = float("nan")

Bucket = list[float]
"""Step, time and value of the least and the greatest value in a range of rows, the earlier one first; one point if both
are the same, none if no value is finite."""


class Cursor(NamedTuple):
    """How much of a table somebody has."""

    num_rows: int = 0
    num_rewinds: int = 0


class Table:
    """Rows in the order of their steps: each has a step, a time and a number in some of the columns.

    `level`: charts show buckets of 2^level rows. It only rises.
    """

    def __init__(self) -> None:
        self.level = 0
        self._steps, self._times = array("q"), array("d")
        self._columns: dict[str, array[float]] = {}
        self._last: dict[str, float] = {}
        self._rewinds: list[int] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def cursor(self) -> Cursor:
        """The cursor of somebody who has all rows."""
        return Cursor(len(self._steps), len(self._rewinds))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns, in the order in which they appeared."""
        return tuple(self._columns)

    @property
    def last_step(self) -> int | None:
        """The step of the last row; None: there is no row."""
        return self._steps[-1] if self._steps else None

    @property
    def first_time_s(self) -> float:
        """When the first row was made; 0: there is no row."""
        return self._times[0] if self._times else 0.0

    def append(self, step: int, time_s: float, values: Mapping[str, float | None]) -> None:
        """Add a row; its step must not be smaller than the last one. Change nothing if a value is no number: raise."""
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        time_s = float(time_s)
        self._steps.append(step)
        self._times.append(time_s)
        for name in numbers:
            if name not in self._columns:
                self._columns[name] = array("d", [_NAN]) * (len(self._steps) - 1)
        for name, column in self._columns.items():
            column.append(numbers.get(name, _NAN))
        self._last.update(numbers)
        if len(self._steps) > MAX_BUCKETS << self.level:
            self.level += 1

    def rewind(self, step: int) -> None:
        """Drop the rows of this step and of later ones: they are being made again."""
        num_rows = bisect_left(self._steps, step)
        if num_rows == len(self._steps):
            return
        self._rewinds.append(num_rows)
        del self._steps[num_rows:], self._times[num_rows:]
        for column in self._columns.values():
            del column[num_rows:]
        newest = {name: _last_of(column) for name, column in self._columns.items()}
        self._last = {name: value for name, value in newest.items() if value is not None}

    def since(self, cursor: Cursor, origin_s: float) -> dict[str, Any] | None:
        """Return the buckets that somebody with this cursor lacks; None: none. Times count from `origin_s`."""
        if cursor == self.cursor:
            return None
        kept = min([cursor.num_rows, *self._rewinds[cursor.num_rewinds :]])
        first = kept >> self.level
        series = {
            name: self._buckets(name, first << self.level, len(self), self.level, origin_s) for name in self.names
        }
        return {"level": self.level, "from": first, "series": series, "last": dict(self._last)}

    def window(self, first_step: float, last_step: float, origin_s: float) -> dict[str, list[Bucket]]:
        """Return finer buckets of the rows between two steps, and of one more on either side: lines reach the edge."""
        begin = max(bisect_left(self._steps, first_step) - 1, 0)
        end = min(bisect_right(self._steps, last_step) + 1, len(self))
        level = (max(end - begin - 1, 0) // MAX_BUCKETS).bit_length()
        return {name: self._buckets(name, begin, end, level, origin_s) for name in self.names}

    def last(self, name: str) -> float | None:
        """Return the last number of a column; None: it has none."""
        return self._last.get(name)

    def _buckets(self, name: str, begin: int, end: int, level: int, origin_s: float) -> list[Bucket]:
        size, num_rows = 1 << level, end - begin
        values = np.full(-(-num_rows // size) * size, np.nan)
        values[:num_rows] = self._columns[name][begin:end]
        rows = values.reshape(-1, size)
        finite = np.isfinite(rows)
        least = np.where(finite, rows, np.inf).argmin(axis=1)
        greatest = np.where(finite, rows, -np.inf).argmax(axis=1)
        starts = begin + np.arange(len(rows)) * size
        return [
            self._points(name, start, sorted({low, high}), origin_s) if has_any else []
            for start, low, high, has_any in zip(*_lists(starts, least, greatest, finite.any(axis=1)), strict=True)
        ]

    def _points(self, name: str, start: int, offsets: list[int], origin_s: float) -> Bucket:
        column, bucket = self._columns[name], []
        for row in (start + offset for offset in offsets):
            bucket += [self._steps[row], round(self._times[row] - origin_s, 3), column[row]]
        return bucket


def _last_of(column: array[float]) -> float | None:
    return next((value for value in reversed(column) if value == value), None)


def _lists(*arrays: npt.NDArray[Any]) -> list[list[Any]]:
    return [array.tolist() for array in arrays]
