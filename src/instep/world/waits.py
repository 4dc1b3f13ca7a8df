"""How long this process has waited for other ranks: in all groups, whoever called the collective.

Counted in the caller's thread. A collective that is called within another one belongs to that one.
"""

import contextlib
import threading
import time
from collections.abc import Iterator


class Waits:
    """Adds up the time of blocking collectives, each a `with` block."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.behind_s = 0.0
        """How long threads beside the caller's have been in collectives."""
        self._for_those_s = 0.0
        """Of `seconds`, how long the caller waited for these threads."""
        self._lock = threading.Lock()
        self._depth = 0
        self._begun = 0.0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._begun

    @property
    def total_s(self) -> float:
        """How long collectives took so far, whether the caller waited or computed meanwhile."""
        return self.seconds - self._for_those_s + self.behind_s

    def count_behind(self, seconds: float) -> None:
        """Count a collective of a thread beside the caller's."""
        with self._lock:
            self.behind_s += seconds

    @contextlib.contextmanager
    def for_another_thread(self) -> Iterator[None]:
        """Wait within a block for a collective of a thread beside the caller's."""
        begun = time.perf_counter()
        try:
            with self:
                yield
        finally:
            self._for_those_s += time.perf_counter() - begun

    @contextlib.contextmanager
    def counted_by_caller(self) -> Iterator[None]:
        """Count nothing within a block: its caller knows better, and adds to `seconds` itself."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


WAITS = Waits()
"""This process's."""
