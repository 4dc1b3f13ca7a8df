"""The smallest and the largest number of columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from instep.data.statistics.column_sums import Floats, check_columns, refuse_infinity


class Extremes:
    """Minimum and maximum of the columns of arrays; NaN counts as missing."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.low: Floats | None = None
        self.high: Floats | None = None
        """NaN for a column that has had no numbers; None: nothing was added yet."""

    def add(self, block: npt.NDArray[Any]) -> None:
        """Add rows: a 2-D array of numbers."""
        if not len(block):
            return
        low = np.fmin.reduce(block, axis=0).astype(np.float64)
        high = np.fmax.reduce(block, axis=0).astype(np.float64)
        refuse_infinity(np.stack([low, high], axis=1), 0)
        self._take(len(block), low, high)

    def _take(self, num_rows: int, low: Floats, high: Floats) -> None:
        if self.low is not None and self.high is not None:
            check_columns(len(low), len(self.low))
            low, high = np.fmin(self.low, low), np.fmax(self.high, high)
        self.num_rows, self.low, self.high = self.num_rows + num_rows, low, high

    def to_json(self) -> dict[str, Any]:
        """Return them as plain values."""
        if self.low is None or self.high is None:
            return {}
        return {"num_rows": self.num_rows, "low": self.low.tolist(), "high": self.high.tolist()}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add those of other rows, which `to_json` returned."""
        if state:
            self._take(int(state["num_rows"]), np.array(state["low"], float), np.array(state["high"], float))
