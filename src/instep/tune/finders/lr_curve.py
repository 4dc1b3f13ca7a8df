"""From the losses of a range test to a learning rate. Pure.

[Note: Which learning rate]
In a range test the learning rate grows by the same factor in every step. The loss first falls, then rises. Two rules
are in use: the rate at which the loss falls fastest (steepest descent), and a tenth of the one at which it is lowest.
The second is only a rule of thumb, but it bounds the first where noise moves it. So both are computed, and the smaller
one is suggested.

The loss is smoothed by straight lines: around each step, one is fitted to the losses of its neighbours by least squares
over the logarithm of the rate. Its value is the smoothed loss and its slope the descent, both without the delay of a
moving average, which would move the suggestion to larger rates. The standard error of the slope says whether there was
a descent at all.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_WINDOW_SHARE = 0.08
"""How many of the steps a straight line is fitted to, on each side."""
_FEWEST_BESIDE = 3
_CLEAR = 4.0
"""How many standard errors a slope is below zero where the loss surely falls: of many slopes the least is taken."""
_FEWEST_TO_DIVERGE = 10
_MEMORY = 0.8
"""Of the moving average that sees whether a test diverges; it may lag."""


@dataclass(frozen=True)
class Smoothed:
    """A straight line around one step: its value, its slope by decade of the rate, the slope's standard error."""

    loss: float
    slope: float
    error: float


@dataclass(frozen=True)
class LrChoice:
    """What a curve suggests; None where it suggests nothing."""

    steepest: float | None
    """Where the loss falls fastest."""
    tenth: float | None
    """A tenth of the rate at which the loss is lowest."""
    lr: float | None
    """The smaller one, rounded to two digits."""
    reason: str
    smoothed: tuple[float, ...]
    """The smoothed losses."""


def rates(low: float, high: float, num_steps: int) -> list[float]:
    """Return the learning rates of the steps, each the same factor larger than the one before."""
    return [low * (high / low) ** (step / (num_steps - 1)) for step in range(num_steps)]


def has_diverged(losses: Sequence[float]) -> bool:
    """Return whether a test need not continue: the loss is not finite, or has risen further than it ever fell.

    It does not depend on the sign of the loss, nor on its unit.
    """
    if losses and not math.isfinite(losses[-1]):
        return True
    if len(losses) < _FEWEST_TO_DIVERGE:
        return False
    start = statistics.fmean(losses[:3])
    noise = statistics.median(abs(b - a) for a, b in itertools.pairwise(losses))
    average, best, weight = 0.0, math.inf, 1.0
    for loss in losses:
        average, weight = _MEMORY * average + (1 - _MEMORY) * loss, weight * _MEMORY
        best = min(best, average / (1 - weight))
    return average / (1 - weight) > start + max(start - best, 6 * noise)


def smooth(lrs: Sequence[float], losses: Sequence[float]) -> list[Smoothed]:
    """Return a straight line around each step."""
    beside = max(_FEWEST_BESIDE, round(_WINDOW_SHARE * len(losses)))
    xs = [math.log10(lr) for lr in lrs]
    windows = [(max(0, i - beside), min(len(losses), i + beside + 1)) for i in range(len(losses))]
    return [_line(xs[a:b], losses[a:b], x) for (a, b), x in zip(windows, xs, strict=True)]


def _line(xs: Sequence[float], ys: Sequence[float], at: float) -> Smoothed:
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    square = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / square
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    error = math.sqrt(rest / max(1, len(xs) - 2) / square)
    return Smoothed(mean_y + slope * (at - mean_x), slope, error)


def choose(lrs: Sequence[float], losses: Sequence[float]) -> LrChoice:
    """Return the learning rate that a range test suggests; see [Note: Which learning rate]."""
    count = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    lrs, losses = lrs[:count], losses[:count]
    if count < 2 * _FEWEST_BESIDE + 1:
        reason = f"the loss was finite in {count} steps only, too few to see where it falls. Begin at smaller rates"
        return LrChoice(None, None, None, reason, ())
    lines = smooth(lrs, losses)
    levels = tuple(line.loss for line in lines)
    lowest = min(range(count), key=levels.__getitem__)
    steepest = min(range(lowest + 1), key=lambda i: lines[i].slope)
    line = lines[steepest]
    if not line.slope < 0 or -line.slope < _CLEAR * line.error:
        reason = (
            f"the loss did not fall clearly anywhere between {lrs[0]:.2g} and {lrs[-1]:.2g}. Use more --steps, a "
            "larger --batch-size, or another range with --over"
        )
        return LrChoice(None, None, None, reason, levels)
    tenth = lrs[lowest] / 10
    lr = float(f"{min(lrs[steepest], tenth):.2g}")
    return LrChoice(lrs[steepest], tenth, lr, _reason(lrs, steepest, lowest), levels)


def _reason(lrs: Sequence[float], steepest: int, lowest: int) -> str:
    fast, low = f"{lrs[steepest]:.2g}", f"{lrs[lowest]:.2g}"
    if lrs[steepest] <= lrs[lowest] / 10:
        reason = f"the loss falls fastest there, and is lowest at {low}, which is more than ten times that"
    else:
        reason = f"it is a tenth of {low}, where the loss is lowest, and less than {fast}, where it falls fastest"
    if lowest >= len(lrs) - 2:
        reason += ". It was still falling at the end of the range: try larger rates with --over"
    return reason
