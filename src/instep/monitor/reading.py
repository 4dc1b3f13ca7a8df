"""The progress of reading or writing files, on standard error: a live line on a terminal, plain lines elsewhere.

Nothing is shown for what is over within two seconds.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.status import Status

PATIENCE_S = 2.0
LIVE_EVERY_S = 0.1
PLAIN_EVERY_S = 5.0


class ReadingDisplay:
    """Shows the progress while the `with` block lasts; called with the number of bytes of every read."""

    def __init__(self, what: str, total_bytes: int | None = None) -> None:
        self._what, self._total_bytes, self._done_bytes = what, total_bytes, 0
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._next = time.monotonic() + PATIENCE_S

    def __call__(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        now = time.monotonic()
        if now < self._next:
            return
        text = self._text(self._done_bytes)
        if not self._console.is_terminal:
            self._next = now + PLAIN_EVERY_S
            self._console.print(text, soft_wrap=True, markup=False)
            return
        self._next = now + LIVE_EVERY_S
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def _text(self, done: int) -> str:
        total = f" of {size_text(self._total_bytes)}" if self._total_bytes is not None else ""
        return f"{self._what}: {size_text(done)}{total} read …"

    def __enter__(self) -> ReadingDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


class WritingDisplay(ReadingDisplay):
    """Shows how many values are written; called with the number of those that were."""

    def _text(self, done: int) -> str:
        return f"{self._what}: {done:,} written …"


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
