"""Being asked to stop, by signals."""

from __future__ import annotations

import time

_ECHO_S = 1.0
"""Signals this close together are one wish: a scheduler may tell a job, its launcher and each of its processes."""


class StopRequest:
    """Whether a process was asked to stop."""

    def __init__(self) -> None:
        self.asked = False
        self._asked_at = 0.0

    def ask(self) -> bool:
        """Note a wish to stop; tell whether it is a second one, which means: at once."""
        now = time.monotonic()
        if self.asked:
            return now - self._asked_at > _ECHO_S
        self.asked, self._asked_at = True, now
        return False
