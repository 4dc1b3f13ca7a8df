"""How far the clock of a node is from the leader's. Pure.

[Note: One time for all nodes]
The leader's listener answers pings with its own time. Every other node takes the middle between sending and receiving
as the moment of the answer. The median of several pings is the offset, and half its round trip is the uncertainty. A
node corrects the times of its failures by its offset before it reports them, so that failures of several nodes can be
put in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOTABLE_NS = 10**9
"""From this offset on a warning is printed: logs and events of two nodes cannot be read side by side."""


@dataclass(frozen=True)
class Ping:
    """One ping: when it was sent and received here, and answered there."""

    sent_ns: int
    answered_ns: int
    """By the other node's clock."""
    received_ns: int


@dataclass(frozen=True, order=True)
class Offset:
    """How far the clock of a node is ahead of the leader's."""

    ahead_ns: int = 0
    doubt_ns: int = 0
    """The true offset is at most this far away."""


def estimate_offset(pings: Sequence[Ping]) -> Offset:
    """Return how far this clock is ahead of the one that answered the pings."""
    offsets = sorted(
        Offset((ping.sent_ns + ping.received_ns) // 2 - ping.answered_ns, (ping.received_ns - ping.sent_ns + 1) // 2)
        for ping in pings
    )
    return offsets[len(offsets) // 2]


def clock_warnings(offsets: Mapping[str, Offset], reference: str) -> list[str]:
    """Return a warning for each node whose clock is far from that of the node called `reference`."""
    return [
        f"The clock of {name} is {abs(offset.ahead_ns) / 1e9:.1f} s "
        f"{'ahead of' if offset.ahead_ns > 0 else 'behind'} that of {reference}, and so are the times in its logs "
        "and events. Failures are put in order by corrected times."
        for name, offset in offsets.items()
        if abs(offset.ahead_ns) - offset.doubt_ns > NOTABLE_NS
    ]
