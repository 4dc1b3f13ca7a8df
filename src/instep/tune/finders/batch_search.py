"""The search for the largest micro-batch that fits into memory: what to try next, and what was found. Pure.

[Note: How large a batch fits]
On an accelerator, batches are doubled until memory runs out, and the limit is then bisected to two percent. On a CPU
that would take the memory of everything else on the machine. There the growth of a process is measured for a few sizes
and continued in a straight line up to what is available; only a limit that is met all the same (ulimit) is bisected.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.02
"""How far below the limit the answer may be."""
_MEASURABLE_BYTES = 64 << 20
"""By so much a process must grow between two sizes before a line through them means anything."""
_STEADY = 0.1
"""By how much its growth with a row may change from one size to the next."""
_MOST_OF_BUDGET = 0.25
"""Of what is available; more is not taken to measure."""
_SLOW_S = 60.0
"""A size that takes so long to try is the last that is tried, unless memory ran out before."""


@dataclass(frozen=True)
class SizeProbe:
    """Steps with one number of rows on each rank."""

    rows: int
    fits: bool
    """Whether no rank ran out of memory."""
    grown_bytes: int = 0
    """By how much memory grew on the rank where it grew most."""
    num_samples: int = 0
    """In a step, over all ranks; fewer than asked for: the training set has no more."""
    seconds: float = 0.0


@dataclass(frozen=True)
class SizeRange:
    """Where to search: rows on each rank of `data_size`."""

    least: int
    most: int | None
    """None: as many as there are samples."""
    first: int
    data_size: int


@dataclass(frozen=True)
class LargestSize:
    """The answer."""

    rows: int
    """The most rows on each rank; 0: not even the least number fits."""
    bound: str
    """What bounds it: memory, data, range, time."""
    tried_rows: int
    """The largest number that was tried and fits; fewer than `rows`: the rest is a straight line."""
    failed_rows: int | None
    """The smallest number for which memory ran out."""
    bytes_per_row: float | None
    """By how much memory grows with each row, where it was measured."""


def next_rows(probes: Sequence[SizeProbe], where: SizeRange, budget_bytes: int | None) -> int | None:
    """Return how many rows to try next; None: the answer is known.

    `budget_bytes` is by how much memory may grow; None: find out.
    """
    if not probes:
        return max(where.least, min(where.first, where.most or where.first))
    good, bad = _good(probes), _bad(probes)
    if bad is not None:
        if bad <= where.least or bad - good <= max(1.0, TOLERANCE * good):
            return None
        return max(where.least, (good + bad) // 2)
    if _is_all_data(probes, where) or (where.most is not None and good >= where.most):
        return None
    if budget_bytes is not None and line(probes, budget_bytes) is not None:
        return None
    if _is_slow(probes):
        return None
    return min(2 * good, where.most or 2 * good)


def largest(probes: Sequence[SizeProbe], where: SizeRange, budget_bytes: int | None) -> LargestSize:
    """Return the answer, once `next_rows` has nothing more to try."""
    good, bad, slope = _good(probes), _bad(probes), line(probes, budget_bytes)
    if bad is not None:
        return LargestSize(good, "memory", good, bad, slope)
    if _is_all_data(probes, where):
        rows = max(1, max(probe.num_samples for probe in probes) // where.data_size)
        return LargestSize(rows, "data", rows, None, slope)
    if where.most is not None and good >= where.most:
        return LargestSize(good, "range", good, None, slope)
    if budget_bytes is None or slope is None:
        return LargestSize(good, "time", good, None, slope)
    top = max(probes, key=lambda probe: probe.rows)
    rows = max(good, top.rows + int((budget_bytes - top.grown_bytes) / slope))
    if where.most is not None and rows >= where.most:
        return LargestSize(where.most, "range", good, None, slope)
    return LargestSize(rows, "memory", good, None, slope)


def line(probes: Sequence[SizeProbe], budget_bytes: int | None) -> float | None:
    """Return by how many bytes a process grows with each row; None: not enough has been measured.

    Small tensors are kept when they are freed, so that the growth of small batches is too large. It is believed when it
    stays the same from one doubling to the next, or when the next batch would take a large part of the budget, or long.
    """
    fitting = sorted((probe for probe in probes if probe.fits), key=lambda probe: probe.rows)
    slopes = [
        (b.grown_bytes - a.grown_bytes) / (b.rows - a.rows) for a, b in itertools.pairwise(fitting) if b.rows > a.rows
    ]
    if not slopes or slopes[-1] * (fitting[-1].rows - fitting[-2].rows) < _MEASURABLE_BYTES:
        return None
    top, slope = fitting[-1], slopes[-1]
    is_steady = len(slopes) > 1 and abs(slope - slopes[-2]) <= _STEADY * slope
    following = top.grown_bytes + slope * top.rows
    is_much = budget_bytes is not None and following > _MOST_OF_BUDGET * budget_bytes
    return slope if is_steady or is_much or _is_slow(probes) else None


def _good(probes: Sequence[SizeProbe]) -> int:
    return max((probe.rows for probe in probes if probe.fits), default=0)


def _bad(probes: Sequence[SizeProbe]) -> int | None:
    return min((probe.rows for probe in probes if not probe.fits), default=None)


def _is_all_data(probes: Sequence[SizeProbe], where: SizeRange) -> bool:
    return any(probe.fits and probe.num_samples < probe.rows * where.data_size for probe in probes)


def _is_slow(probes: Sequence[SizeProbe]) -> bool:
    return any(probe.fits and probe.seconds > _SLOW_S for probe in probes)
