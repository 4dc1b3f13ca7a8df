"""The progress of sending a run to trackers, on standard error: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.status import Status

PATIENCE_S = 2.0
PLAIN_EVERY_S = 5.0


class SendingDisplay:
    """Shows the progress while the `with` block lasts; nothing for what is over within two seconds."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._next = time.monotonic() + PATIENCE_S

    def show(self, trackers: Sequence[tuple[str, int, int]]) -> None:
        """Show how far the trackers are: name, newest step sent, last step."""
        now = time.monotonic()
        if self._is_quiet or now < self._next:
            return
        text = "sending: " + ", ".join(_progress(*tracker) for tracker in trackers)
        if not self._console.is_terminal:
            self._next = now + PLAIN_EVERY_S
            self._console.print(text, soft_wrap=True, markup=False)
        elif self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def __enter__(self) -> SendingDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


def _progress(name: str, step: int, last_step: int) -> str:
    return f"{name} step {step} of {last_step}" if last_step else f"{name} …"
