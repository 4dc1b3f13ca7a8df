"""The log files of the ranks."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class LogPlan:
    """The files that the ranks' output goes to.

    Both streams of rank N are appended, in their order, to `rank-N.log`; with `split`, to `rank-N.stdout.log` and
    `rank-N.stderr.log`. Files are appended to, so they survive restarts.
    """

    directory: Path
    split: bool = False

    def files(self, rank: int) -> dict[Stream, Path]:
        """Return the file of each stream of `rank`; without `split`, that of standard output is for both."""
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        if self.split:
            return {stream: self.directory / f"rank-{rank}.{stream}.log" for stream in streams}
        return {"stdout": self.directory / f"rank-{rank}.log"}

    def error_file(self, rank: int) -> Path:
        """Return the file that standard error of `rank` goes to."""
        files = self.files(rank)
        return files.get("stderr", files["stdout"])


@dataclass(frozen=True)
class LogStart:
    """A rank's log file, and its size before this launch wrote to it: where the relay begins."""

    rank: int
    stream: Stream
    path: str
    offset: int


def redirect_output(plan: LogPlan, rank: int) -> list[LogStart]:
    """Redirect descriptors 1 and 2 of this process, and so of its children, to the rank's files."""
    starts = []
    for stream, path in plan.files(rank).items():
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        starts.append(LogStart(rank, stream, str(path), os.fstat(fd).st_size))
        for target in (1, 2) if not plan.split else (1,) if stream == "stdout" else (2,):
            os.dup2(fd, target)
        os.close(fd)
    for python_stream in (sys.stdout, sys.stderr):
        # Into a file, Python would buffer blocks of output: not visible yet, and lost if the rank is killed.
        python_stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return starts
