"""The log files of the ranks."""

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

    def file(self, rank: int, stream: Stream) -> Path:
        """Return the file that a stream of `rank` goes to."""
        return self.directory / (f"rank-{rank}.{stream}.log" if self.split else f"rank-{rank}.log")

    def error_file(self, rank: int) -> Path:
        """Return the file that standard error of `rank` goes to."""
        return self.file(rank, "stderr")


@dataclass(frozen=True)
class LogStart:
    """A rank's log file, and its size before this launch wrote to it: where the relay begins."""

    rank: int
    stream: Stream
    path: str
    offset: int


def redirect_output(plan: LogPlan, rank: int) -> list[LogStart]:
    """Redirect descriptors 1 and 2 of this process, and so of its children, to the rank's files."""
    starts = {}
    streams: tuple[Stream, ...] = ("stderr", "stdout")  # in one file, what is printed goes to standard output
    for stream in streams:
        path = plan.file(rank, stream)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        starts[path] = LogStart(rank, stream, str(path), os.fstat(fd).st_size)
        os.dup2(fd, 1 if stream == "stdout" else 2)
        os.close(fd)
    for python_stream in (sys.stdout, sys.stderr):
        # Into a file, Python would buffer blocks of output: not visible yet, and lost if the rank is killed.
        python_stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return list(starts.values())
