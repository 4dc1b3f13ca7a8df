"""The seam for everything that looks at a run in progress, within the command: a terminal display, a page.

Trackers have their own seam and their own processes: monitor/tracking.

A reader is a subclass of `EventReader` in a file of its own and one line of `READERS` in monitor/follow.py.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TextIO


class EventReader(ABC):
    """Receives the events of a run: the lines of rank 0's log (events/schema.py), in order, each once.

    All methods are called from one thread of the launching process; the training does not wait for it. A reader that
    raises is dropped with a message, and the training continues. Events that an earlier command wrote are not passed.
    """

    repeats: ClassVar[bool] = False
    """Whether the reader receives a step again that a restart made again (and its evaluation and checkpoint)."""

    @abstractmethod
    def read(self, event: dict[str, Any]) -> None:
        """Receive one event."""

    def refresh(self) -> None:  # noqa: B027 - optional
        """Show what was received; called several times a second, after the new events."""

    def pause(self) -> None:  # noqa: B027 - optional
        """Leave the terminal to somebody else, until the next `refresh`."""

    def stream(self, target: TextIO) -> TextIO:
        """Return where to write what the ranks print; a display that draws on the terminal replaces `target`."""
        return target

    def close(self) -> None:  # noqa: B027 - optional
        """Release what the reader holds; called once, after the last event."""
