"""How far a machine's clock is from another's. Pure.

[Note: One time for all machines]
The launching process that hosts the board answers pings with its own time; each of the others takes the middle between
sending and receiving for the moment of the answer. The median of several rounds is the offset, half its round trip the
doubt. Times that a machine has noted are corrected by its offset before they are compared with another machine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOTABLE_NS = 10**9
"""From here on a person is told: logs and events of two machines cannot be read side by side."""


@dataclass(frozen=True)
class Round:
    """One ping: when it was sent and answered, here and there."""

    sent_ns: int
    answered_ns: int
    """By the other one's clock."""
    received_ns: int


@dataclass(frozen=True, order=True)
class Offset:
    """How far this machine's clock is ahead of the one that all are compared with."""

    ahead_ns: int = 0
    doubt_ns: int = 0
    """The true value is not further away than this."""


def estimate_offset(rounds: Sequence[Round]) -> Offset:
    """Estimate from several pings how far this clock is ahead."""
    found = sorted(
        Offset((each.sent_ns + each.received_ns) // 2 - each.answered_ns, (each.received_ns - each.sent_ns + 1) // 2)
        for each in rounds
    )
    return found[len(found) // 2]


def clock_warnings(offsets: Mapping[str, Offset], reference: str) -> dict[str, str]:
    """Say of each machine whose clock is notably off, by its name, by how much."""
    return {
        name: (
            f"The clock of {name} is {abs(offset.ahead_ns) / 1e9:.1f} s "
            f"{'ahead of' if offset.ahead_ns > 0 else 'behind'} that of {reference}, and so are the times in its logs "
            "and events. Failures are put in order by corrected times."
        )
        for name, offset in offsets.items()
        if abs(offset.ahead_ns) - offset.doubt_ns > NOTABLE_NS
    }
