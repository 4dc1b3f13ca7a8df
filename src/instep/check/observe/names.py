"""Names for objects that ranks make alike: by the user's line that made them, and how many it had made.

Ranks: all.
"""

from __future__ import annotations

import collections
import sys

from instep.check.observe.log import ObservationLog


class PlaceNames:
    """Gives names that are the same on all ranks, as long as each rank makes its objects in the same order."""

    def __init__(self, log: ObservationLog) -> None:
        self._log = log
        self._counts: collections.Counter[str] = collections.Counter()

    def next_here(self) -> str:
        """Return the name of what the user's line that is being executed makes: `file:line#n`."""
        file, line = self._log.place(sys._getframe(1))
        place = f"{file}:{line}"
        self._counts[place] += 1
        return f"{place}#{self._counts[place] - 1}"
