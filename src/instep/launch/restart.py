"""Whether a failed attempt is restarted. Pure.

Restarts are counted since the last progress. A run that gets further each time may fail any number of times; one that
does not is given up after --max-restarts, or as soon as the user's own code fails the same way twice. If that fails
before the first step has succeeded once, it is not restarted at all.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from instep.core.errors import EXIT_USER, FailureRecord

_REPEATS = "not restarted again: it failed the same way twice, without progress in between"
_NEVER_BEGUN = "not restarted: no step has succeeded yet"


@dataclass(frozen=True)
class RestartPlan:
    """Whether to restart, and the failures to report if not."""

    restart: bool
    failures: tuple[FailureRecord, ...]


def plan_restart(
    failures: Sequence[FailureRecord],
    previous: Sequence[FailureRecord],
    in_vain: int,
    max_restarts: int,
    has_begun: bool = True,
) -> RestartPlan:
    """Decide what follows a failed attempt after `in_vain` restarts without progress; the last failed as `previous`.

    `has_begun`: whether a step has succeeded, in this attempt or before.
    """
    first = failures[0]
    if in_vain >= max_restarts or first.final:
        return RestartPlan(False, tuple(failures))
    # Only for the user's own code: two kills, or two lost connections, look alike and say nothing about a third. The
    # first one may be another rank.
    if first.exit_code != EXIT_USER or (has_begun and not _is_alike(first, previous)):
        return RestartPlan(True, tuple(failures))
    why = _REPEATS if has_begun else _NEVER_BEGUN
    noted = dataclasses.replace(
        first,
        summary=f"{first.summary} ({why})",
        traceback=f"{first.traceback.rstrip()}\n({why})\n" if first.traceback else "",
    )
    return RestartPlan(False, (noted, *failures[1:]))


def _is_alike(first: FailureRecord, previous: Sequence[FailureRecord]) -> bool:
    """Return whether the last attempt failed the same way, apart from the numbers in its message."""
    return bool(previous) and _without_numbers(first.summary) == _without_numbers(previous[0].summary)


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "0", text)
