"""The axis of a chart: its range, its ticks and their texts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LARGEST = 1e290
"""Larger numbers are drawn as little as infinite ones: their differences overflow."""
_SMALLEST = 1e-290
_FLAT = 1e-9
"""A range that is smaller, relative to its numbers, has no ticks that differ in their texts."""
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """A range of numbers and where its ticks are."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies: 0 at the lower end, 1 at the upper one; values outside are put at the ends."""
        if self.is_log:
            low, high = math.log10(self.low), math.log10(self.high)
            place = (math.log10(max(value, _SMALLEST)) - low) / (high - low)
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, place))

    def texts(self) -> list[str]:
        """Return the texts of the ticks: as few digits as tell them apart."""
        for digits in range(1, 12):
            texts = [number_text(tick, digits) for tick in self.ticks]
            if len(set(texts)) == len(texts) and self._are_exact(digits):
                return texts
        return [number_text(tick, 12) for tick in self.ticks]

    def _are_exact(self, digits: int) -> bool:
        span = max(abs(tick) for tick in self.ticks) if self.ticks else 1.0
        return all(abs(float(f"{tick:.{digits}g}") - tick) <= 1e-6 * span for tick in self.ticks)


def is_drawn(value: float | None) -> bool:
    """Return whether a value has a place on an axis."""
    return value is not None and math.isfinite(value) and abs(value) <= LARGEST


def linear_axis(values: Iterable[float], count: int = 5, from_zero: bool = False) -> Axis:
    """Return an axis that holds all values, with about `count` ticks; without values, the one from 0 to 1."""
    drawn = [value for value in values if is_drawn(value)] or [0.0, 1.0]
    low, high = min(drawn), max(drawn)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    size = max(abs(low), abs(high))
    if high - low <= max(_FLAT * size, _SMALLEST):
        pad = 0.05 * size if size > 100 * _SMALLEST else 1.0
        low, high = low if from_zero and low == 0 else low - pad, high + pad
    step = _nice((high - low) / count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(min(high, max(low, number * step)) for number in range(first, last + 1))
    return Axis(low, high, ticks)


def log_axis(values: Iterable[float]) -> Axis:
    """Return a logarithmic axis that holds all positive values."""
    drawn = [value for value in values if is_drawn(value) and value >= _SMALLEST] or [1.0, 10.0]
    low, high = min(drawn), max(drawn)
    if high < low * 1.01:
        low, high = low / 1.1, high * 1.1
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / 6))
    ticks = [10.0**power for power in range(first, last + 1, every)]
    if last - first < 2:  # one decade, or less: 1, 2, 5
        ticks = [m * 10.0**power for power in range(first - 1, last + 1) for m in (1.0, 2.0, 5.0)]
    inside = tuple(min(high, max(low, tick)) for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9))
    return Axis(low, high, inside or (low, high), is_log=True)


def _nice(step: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0) if m * power >= step * (1 - 1e-9))


def number_text(value: float, digits: int = 4) -> str:
    """Return a number in few characters: 1.5k, 0.001, 2e-5."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(float(f"{value:.{digits}g}"))
    if size >= 1e15 or 0 < size < 1e-3:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return _trimmed(mantissa) + f"e{int(power)}"
    for unit, suffix in _SUFFIXES:
        if size >= unit and size >= 1e4:
            return _plain(value / unit, digits) + suffix
    return _plain(value, digits)


def _plain(value: float, digits: int) -> str:
    rounded = float(f"{value:.{digits}g}")
    decimals = 0 if rounded == 0 else max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return _trimmed(f"{rounded:.{decimals}f}")


def _trimmed(text: str) -> str:
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text.replace("-", "−", 1)
