"""Whether a failed attempt is restarted. Pure.

Restarts are counted since the last progress. A run that gets further each time may fail any number of times; one that
does not is given up after --max-restarts, or as soon as the user's own code fails the same way twice.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from instep.core.errors import EXIT_USER, FailureRecord

_REPEATS = "not restarted again: it failed the same way twice, without progress in between"


@dataclass(frozen=True)
class RestartPlan:
    """Whether to restart, and the failures to report if not."""

    restart: bool
    failures: tuple[FailureRecord, ...]


def plan_restart(
    failures: Sequence[FailureRecord], previous: Sequence[FailureRecord], in_vain: int, max_restarts: int
) -> RestartPlan:
    """Decide what follows a failed attempt after `in_vain` restarts without progress; the last failed as `previous`."""
    first = failures[0]
    if in_vain >= max_restarts or first.final:
        return RestartPlan(False, tuple(failures))
    # Only for the user's own code: two kills, or two lost connections, look alike and say nothing about a third. The
    # first one may be another rank.
    if first.exit_code == EXIT_USER and previous and first.summary == previous[0].summary:
        noted = dataclasses.replace(
            first,
            summary=f"{first.summary} ({_REPEATS})",
            traceback=f"{first.traceback.rstrip()}\n({_REPEATS})\n" if first.traceback else "",
        )
        return RestartPlan(False, (noted, *failures[1:]))
    return RestartPlan(True, tuple(failures))
