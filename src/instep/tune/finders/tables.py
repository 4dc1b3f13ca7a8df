"""Measured speeds as columns of a table and as plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from instep.core.interval import Estimate
from instep.tune.finders.choice import speeds
from instep.tune.finders.finder import Series


def speed_columns(speeds: Mapping[int, Estimate]) -> dict[int, tuple[str, str]]:
    """Return the mean of each candidate and its interval, as texts."""
    return {
        key: (f"{e.mean:,.0f}", "" if e.low is None or e.high is None else f"{e.low:,.0f} to {e.high:,.0f}")
        for key, e in speeds.items()
    }


def speed_json(rates: Mapping[int, Sequence[float]]) -> list[dict[str, Any]]:
    """Return each candidate with its samples per second: mean, interval, and all rounds."""
    return [
        {"value": key, "mean": e.mean, "low": e.low, "high": e.high, "rounds": list(rates[key])}
        for key, e in speeds(rates).items()
    ]


def speed_series(speeds: Mapping[int, Estimate]) -> Series:
    """Return the curve of the means with their intervals."""
    estimates = list(speeds.values())
    lows, highs = [each.low for each in estimates], [each.high for each in estimates]
    return Series("samples/s", list(speeds), [each.mean for each in estimates], lows, highs)
