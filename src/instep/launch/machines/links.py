"""Which links between machines are slow. Pure: from what was measured to sentences."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from instep.launch.machines.peers import Link

USUAL_BITS_PER_S = 1e9
"""What machines that train together have at least."""
_MUCH_SLOWER = 3.0
_SLOW_LATENCY_S, _TIMES_LATENCY = 1e-3, 5.0

Pair = tuple[str, str]
"""Names of machines: from, to."""


def slow_links(links: Mapping[Pair, Link]) -> list[str]:
    """Name the links that are much slower than the others, or than any such link should be."""
    found = []
    for (here, there), link in sorted(links.items(), key=lambda item: item[1].bits_per_s):
        others = [other.bits_per_s for pair, other in links.items() if pair != (here, there)]
        usual = statistics.median(others) if others else USUAL_BITS_PER_S
        # 1 Gbit/s carries some 940 Mbit/s of data: a link that does so is not slow by itself.
        if link.bits_per_s < usual / _MUCH_SLOWER or link.bits_per_s < 0.8 * USUAL_BITS_PER_S:
            compared = f", the others {rate(usual)}" if others and usual > 1.2 * link.bits_per_s else ""
            found.append(f"{here} -> {there}: {rate(link.bits_per_s)}{compared}")
    return found


def distant_links(links: Mapping[Pair, Link]) -> list[str]:
    """Name the links whose answers take much longer than those of the others."""
    found = []
    for (here, there), link in sorted(links.items(), key=lambda item: -item[1].latency_s):
        others = [other.latency_s for pair, other in links.items() if pair != (here, there)]
        usual = statistics.median(others) if others else 0.0
        if link.latency_s > max(_SLOW_LATENCY_S, _TIMES_LATENCY * usual):
            compared = f", the others {duration(usual)}" if others else ""
            found.append(f"{here} -> {there}: {duration(link.latency_s)} there and back{compared}")
    return found


def rate(bits_per_s: float) -> str:
    """Write bits a second for a person."""
    if bits_per_s >= 1e9:
        return f"{bits_per_s / 1e9:.1f} Gbit/s"
    return f"{bits_per_s / 1e6:.0f} Mbit/s" if bits_per_s >= 1e7 else f"{bits_per_s / 1e6:.1f} Mbit/s"


def duration(seconds: float) -> str:
    """Write a short time for a person."""
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def pairings(count: int) -> list[list[tuple[int, int]]]:
    """Pair up so many machines in turns: in each, nobody is in two pairs, and over all everybody meets everybody."""
    places: list[int | None] = [*range(count)]
    if count % 2:
        places.append(None)
    turns = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        turns.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return turns
