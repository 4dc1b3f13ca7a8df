"""The progress of an evaluation or a prediction: a live line on a terminal, plain lines elsewhere.

Nothing is shown for one that is over within two seconds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar, TextIO

from rich.console import Console
from rich.status import Status

from instep.monitor.reader import EventReader
from instep.monitor.reading import PATIENCE_S, PLAIN_EVERY_S


class RowsDisplay(EventReader):
    """Shows how many samples are computed."""

    repeats: ClassVar[bool] = True

    def __init__(self, _folder: Path) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._text = ""
        self._next = time.monotonic() + PATIENCE_S

    def read(self, event: dict[str, Any]) -> None:
        """Take an event in; print a notice."""
        if event["event"] == "rows":
            self._text = f"{event['num_rows']:,} of {event['total_rows']:,} samples"
        elif event["event"] == "notice":
            self._console.print(f"note: {event['text']}", markup=False, soft_wrap=True)

    def refresh(self) -> None:
        """Update the line; where it cannot be updated, print one from time to time."""
        now = time.monotonic()
        if not self._text or now < self._next:
            return
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status(self._text)
                self._status.start()
            self._status.update(self._text)
        else:
            self._next = now + PLAIN_EVERY_S
            self._console.print(self._text, markup=False, soft_wrap=True)
            self._text = ""

    def pause(self) -> None:
        """Remove the line until the next refresh."""
        self.close()

    def stream(self, target: TextIO) -> TextIO:
        """Return where the ranks print: rich moves its line out of the way of what goes through this process."""
        return target

    def close(self) -> None:
        """Remove the line."""
        if self._status is not None:
            self._status.stop()
            self._status = None
