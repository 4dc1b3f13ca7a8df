"""The progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

import io
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, TextIO, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from instep.monitor.bottleneck.verdict import last_word
from instep.monitor.progress import ProgressState, fit, wrapped
from instep.monitor.reader import EventReader

PLAIN_EVERY_S = 5.0
_BAR_COLUMNS = 8
"""What the bar has at least."""
_NAMED_COLUMNS = 60
"""Where there are so many, the Task's name is shown, if it is short."""
_GAPS = 3


class TerminalDisplay(EventReader):
    """Shows where a run is, and the events that a person should see."""

    repeats: ClassVar[bool] = True

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._is_complete = False
        self._state = ProgressState()
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._next_plain = time.monotonic() + PLAIN_EVERY_S
        if self._console.is_terminal:
            self._bar = _TwoLines(console=self._console, transient=True, refresh_per_second=5)
            self._bar.start()

    def read(self, event: dict[str, Any]) -> None:
        """Take an event in, and print its line if it has one."""
        self._is_complete = event["event"] == "end" and event["status"] == "complete"
        line = self._state.take(event)
        if line is not None:
            if not self._console.is_terminal:
                self._console.print(line, markup=False, soft_wrap=True)
            else:  # the terminal itself would wrap lines in the middle of a word
                self._console.print(wrapped(line, self._console.width), markup=False, style="dim")

    def refresh(self) -> None:
        """Draw the bar; where there is none, print a line from time to time."""
        if not self._state.num_steps:
            return
        if self._bar is not None:
            if not self._bar.live.is_started:
                self._bar.start()
            width, state = self._console.width, self._state
            name = state.task if width >= _NAMED_COLUMNS and len(state.task) <= width // 4 else ""
            line = fit(state.position(), width - _BAR_COLUMNS - len(name) - _GAPS)
            shown: dict[str, Any] = {"description": name, "line": line, "details": fit(state.details(), width)}
            if self._task is None:
                self._task = self._bar.add_task(**shown)
            self._bar.update(self._task, total=state.num_steps, completed=state.step, **shown)
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
        """Remove the bar; after a complete run of some length, say what bounded its speed, unless nothing did."""
        if self._bar is not None:
            self._bar.stop()
        if self._is_complete and (text := last_word(self._run_dir)) is not None:
            self._console.print(text, markup=False, soft_wrap=True)


class _TwoLines(Progress):
    """A bar with where the run is, and below it what else is known. Lines that fit are given: nothing is cut."""

    def __init__(self, **options: Any) -> None:
        name, line = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[line]"))
        super().__init__(name, BarColumn(bar_width=None), line, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        for task in self.tasks:
            if task.fields["details"]:
                yield Text(task.fields["details"], "dim")


class _AboveBar(io.TextIOBase):
    """Writes whole lines above the live bar."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.print(text.rstrip("\n"), markup=False, soft_wrap=True)
        return len(text)

    def isatty(self) -> bool:
        return True
