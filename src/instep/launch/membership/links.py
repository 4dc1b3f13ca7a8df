"""Which links between nodes are slow. Pure: from measurements to sentences."""

import statistics
from collections.abc import Mapping

from instep.launch.membership.peers import Link

USUAL_BITS_PER_S = 1e9
"""The least that nodes that train together have."""
_MUCH_SLOWER = 3.0
_SLOW_LATENCY_S, _TIMES_LATENCY = 1e-3, 5.0

Pair = tuple[str, str]
"""Names of nodes: from, to."""


def slow_links(links: Mapping[Pair, Link]) -> list[str]:
    """Return a sentence for each link that is much slower than the others, or than any link should be."""
    sentences = []
    for (here, there), link in sorted(links.items(), key=lambda item: item[1].bits_per_s):
        others = [other.bits_per_s for pair, other in links.items() if pair != (here, there)]
        usual = statistics.median(others) if others else USUAL_BITS_PER_S
        # 1 Gbit/s carries about 940 Mbit/s of data: such a link is not slow by itself.
        if link.bits_per_s < usual / _MUCH_SLOWER or link.bits_per_s < 0.8 * USUAL_BITS_PER_S:
            compared = f", the others {rate(usual)}" if others and usual > 1.2 * link.bits_per_s else ""
            sentences.append(f"{here} -> {there}: {rate(link.bits_per_s)}{compared}")
    return sentences


def distant_links(links: Mapping[Pair, Link]) -> list[str]:
    """Return a sentence for each link whose round trip is much longer than that of the others."""
    sentences = []
    for (here, there), link in sorted(links.items(), key=lambda item: -item[1].latency_s):
        others = [other.latency_s for pair, other in links.items() if pair != (here, there)]
        usual = statistics.median(others) if others else 0.0
        if link.latency_s > max(_SLOW_LATENCY_S, _TIMES_LATENCY * usual):
            compared = f", the others {duration(usual)}" if others else ""
            sentences.append(f"{here} -> {there}: {duration(link.latency_s)} there and back{compared}")
    return sentences


def rate(bits_per_s: float) -> str:
    """Return a bandwidth as text."""
    if bits_per_s >= 1e9:
        return f"{bits_per_s / 1e9:.1f} Gbit/s"
    return f"{bits_per_s / 1e6:.0f} Mbit/s" if bits_per_s >= 1e7 else f"{bits_per_s / 1e6:.1f} Mbit/s"


def duration(seconds: float) -> str:
    """Return a short time as text."""
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def pairings(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of `count` nodes: no node is twice in one round, and every two nodes meet once."""
    places: list[int | None] = [*range(count)]
    if count % 2:
        places.append(None)
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds
