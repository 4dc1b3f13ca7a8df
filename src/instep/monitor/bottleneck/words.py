"""Times of a step as text."""

from __future__ import annotations

from instep.monitor.bottleneck.frontier import Frontier


def time_text(seconds: float) -> str:
    """Return a time of a part of a step as text."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def per_step(seconds: float, frontier: Frontier) -> str:
    """Return what a step has of a time of the whole run, as text."""
    return time_text(seconds / max(1, frontier.num_steps))
