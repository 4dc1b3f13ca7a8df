"""Data that breaks formulas which round, and a stream of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_random = np.random.default_rng(7)
_signs = _random.choice([-1.0, 1.0], (300, 3))

NASTY: dict[str, npt.NDArray[np.generic]] = {
    "normal": _random.normal(size=(5000, 3)),
    "far from zero": 1e9 + 1e-3 * _random.normal(size=(2500, 2)),
    "constant": np.column_stack([np.full(400, 0.1), np.full(400, -1e9), np.zeros(400)]),
    "mixed magnitudes": _signs * 10.0 ** _random.uniform(-140, 140, (300, 3)),
    "missing": np.where(_random.random((700, 3)) < 0.3, np.nan, _random.normal(5, 2, (700, 3))),
    "a column of NaN": np.column_stack([np.full(20, np.nan), np.arange(20.0)]),
    "float32": _random.normal(100, 1e-2, (3000, 3)).astype(np.float32),
    "bytes": _random.integers(0, 256, (4100, 3)).astype(np.uint8),
    "integers": _random.integers(-(10**6), 10**6, (300, 2)),
    "one row": np.array([[3.5, -2.0, 0.0]]),
    "subnormal": _random.integers(1, 9, (50, 2)) * 5e-324,
    "wide": _random.normal(size=(40, 70)),
}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __iter__(self) -> Any:
        return iter(self._rows)
