"""The progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

import io
import time
from pathlib import Path
from typing import Any, ClassVar, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from instep.monitor.progress import ProgressState
from instep.monitor.reader import EventReader

PLAIN_EVERY_S = 5.0


class TerminalDisplay(EventReader):
    """Shows where a run is, and the events that a person should see."""

    repeats: ClassVar[bool] = True

    def __init__(self, _run_dir: Path) -> None:
        self._state = ProgressState()
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._next_plain = time.monotonic() + PLAIN_EVERY_S
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[line]}"))
            self._bar = Progress(*columns, console=self._console, transient=True, refresh_per_second=5)
            self._bar.start()

    def read(self, event: dict[str, Any]) -> None:
        """Take an event in, and print its line if it has one."""
        line = self._state.take(event)
        if line is not None:
            style = "dim" if self._console.is_terminal else ""
            self._console.print(line, markup=False, soft_wrap=True, style=style)

    def refresh(self) -> None:
        """Draw the bar; where there is none, print a line from time to time."""
        if not self._state.num_steps:
            return
        if self._bar is not None:
            if not self._bar.live.is_started:
                self._bar.start()
            if self._task is None:
                self._task = self._bar.add_task(self._state.task, line="")
            total, step = self._state.num_steps, self._state.step
            self._bar.update(self._task, total=total, completed=step, line=self._state.line())
        elif time.monotonic() >= self._next_plain and self._state.step > self._state.first_step:
            self._next_plain = time.monotonic() + PLAIN_EVERY_S
            self._console.print(self._state.line(), markup=False, soft_wrap=True)

    def pause(self) -> None:
        """Remove the bar until the next refresh."""
        if self._bar is not None:
            self._bar.stop()

    def stream(self, target: TextIO) -> TextIO:
        """Return a stream whose lines appear above the bar."""
        if self._bar is None or not target.isatty():
            return target
        return cast(TextIO, _AboveBar(self._console))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


class _AboveBar(io.TextIOBase):
    """Writes whole lines above the live bar."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.print(text.rstrip("\n"), markup=False, soft_wrap=True)
        return len(text)

    def isatty(self) -> bool:
        return True
