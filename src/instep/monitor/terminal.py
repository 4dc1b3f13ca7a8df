"""The live progress of a run: a bar on a terminal, plain lines elsewhere.

A thread follows the events of rank 0, a few times a second; the training does not know that it is watched.
"""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from instep.events.read import EventTail, path_of
from instep.monitor.progress import ProgressState

POLL_S = 0.2
PLAIN_EVERY_S = 5.0


class TerminalDisplay:
    """Shows a run on standard error while the `with` block lasts."""

    def __init__(self, run_dir: Path, quiet: bool = False) -> None:
        self._tail = EventTail(path_of(run_dir))
        for _ in self._tail.poll():  # what an earlier process wrote is history
            pass
        self._state = ProgressState()
        self._console = Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="instep-display", daemon=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._next_plain = time.monotonic() + PLAIN_EVERY_S

    def __enter__(self) -> TerminalDisplay:
        if self._quiet:
            return self
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[line]}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True, refresh_per_second=5)
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._quiet:
            return
        self._done.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    def stream(self, target: TextIO) -> TextIO:
        """Give a stream for the workers' output that does not tear the bar apart."""
        if self._bar is None or not target.isatty():
            return target
        return cast(TextIO, _AboveBar(self._console))

    def _follow(self) -> None:
        while not self._done.wait(POLL_S):
            self._show()
        self._show()

    def _show(self) -> None:
        for event in self._tail.poll():
            line = self._state.take(event)
            if line is not None:
                self._console.print(
                    line, markup=False, soft_wrap=True, style="dim" if self._console.is_terminal else ""
                )
        if not self._state.num_steps:
            return
        if self._bar is not None:
            self._draw(self._bar)
        elif time.monotonic() >= self._next_plain and self._state.step > self._state.first_step:
            self._next_plain = time.monotonic() + PLAIN_EVERY_S
            self._console.print(self._state.line(), markup=False, soft_wrap=True)

    def _draw(self, bar: Progress) -> None:
        if self._task is None:
            self._task = bar.add_task(self._state.task, total=self._state.num_steps, line="")
        bar.update(self._task, total=self._state.num_steps, completed=self._state.step, line=self._state.line())


class _AboveBar(io.TextIOBase):
    """Writes whole lines above the live bar."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.print(text.rstrip("\n"), markup=False, soft_wrap=True)
        return len(text)

    def isatty(self) -> bool:
        return True
