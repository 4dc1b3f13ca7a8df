"""Threads that fetch blocks before they are read.

Ranks: all; those of a machine share the work, because each fetches what no other is fetching.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from instep.core.errors import InstepError

_THREADS = 8


class Prefetcher:
    """Calls a function for each of some numbers, in a few threads that end when there is nothing to do."""

    def __init__(self, fetch: Callable[[int], None]) -> None:
        self._fetch = fetch
        self._waiting: deque[int] = deque()
        self._threads: list[threading.Thread] = []

    def add(self, numbers: list[int]) -> None:
        """Fetch these next, after those that wait already. Called by one thread."""
        self._waiting.extend(numbers)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(min(_THREADS - len(self._threads), len(numbers))):
            thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            try:
                number = self._waiting.popleft()
            except IndexError:
                return
            with suppress(InstepError):  # whoever reads the block raises it
                self._fetch(number)
