"""How long this process has waited for other ranks: in all groups, whoever called the collective.

Counted in the caller's thread. A collective that is called within another one belongs to that one.
"""

import contextlib
import time
from collections.abc import Iterator


class Waits:
    """Adds up the time of blocking collectives, each a `with` block."""

    def __init__(self) -> None:
        self.seconds = 0.0
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
