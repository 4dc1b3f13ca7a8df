"""The file that a rank's observations go to, and the place in the user's code that an observation belongs to.

Ranks: all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from instep.check.observations import Observation
from instep.core.frames import is_users


class ObservationLog:
    """Takes a rank's observations while it is watched."""

    def __init__(self, folder: Path, rank: int, script: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self.step = 0
        """Optimizer steps that the rank has finished."""
        self.is_open = True
        """Whether hooks still have to look; afterwards they cost one comparison."""
        self._is_ending = False
        self.script = os.path.realpath(script)
        """The file that was started."""
        # One write a line: what a killed rank has seen stays.
        self._file = (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8", buffering=1)
        self._quiet = threading.local()
        self._is_fork = False
        os.register_at_fork(after_in_child=self._note_fork)

    def write(self, kind: type[Observation], frame_depth: int = 1, **fields: Any) -> None:
        """Write an observation that belongs to the user's line which is being executed."""
        if self.is_open:
            self.write_at(self.place(sys._getframe(frame_depth)), kind, **fields)

    def write_at(self, place: tuple[str, int], kind: type[Observation], **fields: Any) -> None:
        """Write an observation that belongs to a (file, line) of the user's."""
        if self.is_open:
            self._file.write(kind(step=self.step, file=place[0], line=place[1], **fields).to_line() + "\n")

    def place(self, frame: FrameType | None) -> tuple[str, int]:
        """Return the innermost (file, line) of the user's own code; ("", 0): no such code is being executed."""
        while frame is not None:
            if self.is_users(frame):
                return frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        return "", 0

    def is_users(self, frame: FrameType) -> bool:
        """Return whether a frame executes the user's own code."""
        return _is_users(frame.f_code.co_filename, self.script)

    def callers(self, frame: FrameType | None) -> list[str]:
        """Return the user's functions that are being executed, the innermost first, as `file:line:function`."""
        functions: list[str] = []
        while frame is not None:
            if self.is_users(frame):
                functions.append(f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}")
            frame = frame.f_back
        return functions

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Make hooks of this thread ignore what an observer does itself while the block runs."""
        before, self._quiet.on = self.is_quiet, True
        try:
            yield
        finally:
            self._quiet.on = before

    @property
    def is_quiet(self) -> bool:
        """Whether this thread executes an observer's own code, or nothing is observed any more.

        Nor is a process that the script forks: its doings are not the rank's. Only data workers are.
        """
        if self._is_fork and get_worker_info() is None:
            return True
        return not self.is_open or self._is_ending or getattr(self._quiet, "on", False)

    def _note_fork(self) -> None:
        self._is_fork = True

    def stop_observing(self) -> None:
        """Make hooks look no more; what is known may still be written."""
        self._is_ending = True

    def close(self) -> None:
        """Write no more."""
        self.is_open = False
        self._file.close()


@functools.lru_cache(maxsize=4096)
def _is_users(name: str, script: str) -> bool:
    """Return whether a file is the user's: the script itself, or anything that is not installed."""
    return not name.startswith("<") and (is_users(name) or os.path.realpath(name) == script)
