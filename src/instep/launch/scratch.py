"""The folder through which the launching process, the keepers and the workers tell each other things.

    lifeline                   a FIFO whose only writer is the launching process: its end is everybody's end
    asked, ending              the launching process was asked to stop; it ends everything now
    given-up                   a rank found that another attempt could only fail the same way
    logs/rank-1.json           where rank 1's output goes, and from which byte on it is this launch's
    attempt-0/rank-1.keeper    the process that watches over rank 1, from when it does
    attempt-0/rank-1.json      how rank 1 failed, a FailureRecord
    attempt-0/rank-1.result    what rank 1's entry returned, as JSON
    attempt-0/rank-1.pulse     where rank 1 is, in shared memory
    attempt-0/rank-1.stacks    the stacks of rank 1's processes, whenever they are asked for

Room: no torch, and no pickle: what to run travels in memory. Every file is written under another name and
renamed, so a reader never sees half of one; but stacks are appended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from instep.core.errors import FailureRecord
from instep.core.stop import taking_over
from instep.launch.logs import LogStart

_NEW_S = 60.0
"""A folder so young may belong to a launch that has not opened its lifeline yet."""
Mark = Literal["asked", "ending", "given-up"]


@dataclass(frozen=True)
class Scratch:
    """A launch's scratch folder; lives as long as the launch."""

    folder: Path

    @property
    def lifeline(self) -> Path:
        """The FIFO that ends when the launching process does."""
        return self.folder / "lifeline"

    def announce_logs(self, rank: int, starts: Sequence[LogStart]) -> None:
        """Say where a rank's output begins; the first attempt's word counts, later ones append to it."""
        path = self.folder / "logs" / f"rank-{rank}.json"
        if not path.exists():
            _write(path, json.dumps([dataclasses.asdict(start) for start in starts]).encode())

    def announced_logs(self, known: Collection[str]) -> dict[str, list[LogStart]]:
        """Return where the ranks' output begins, by the announcement's name, without those already known."""
        return {
            path.name: [LogStart(**start) for start in json.loads(path.read_bytes())]
            for path in sorted((self.folder / "logs").glob("*.json"))
            if path.name not in known
        }

    def announce_keeper(self, attempt: int, rank: int, pid: int) -> None:
        """Say who passes signals on to a rank."""
        _write(self._of(attempt, rank, "keeper"), str(pid).encode())

    def mark(self, what: Mark) -> None:
        """Let everybody know."""
        _write(self.folder / what, b"")

    def is_marked(self, what: Mark) -> bool:
        """Tell whether somebody has let everybody know."""
        return (self.folder / what).exists()

    def keepers(self, attempt: int) -> list[int]:
        """Return the processes that watch over an attempt's ranks."""
        paths = sorted((self.folder / f"attempt-{attempt}").glob("*.keeper"))
        return [int(path.read_bytes()) for path in paths]

    def save_failure(self, attempt: int, record: FailureRecord) -> None:
        """Note how a rank failed."""
        _write(self._of(attempt, record.rank, "json"), json.dumps(dataclasses.asdict(record)).encode())

    def load_failure(self, attempt: int, rank: int) -> FailureRecord | None:
        """Return how a rank failed, if it noted that."""
        path = self._of(attempt, rank, "json")
        return FailureRecord(**json.loads(path.read_bytes())) if path.exists() else None

    def drop_failure(self, attempt: int, rank: int) -> None:
        """Take a rank's note back."""
        self._of(attempt, rank, "json").unlink(missing_ok=True)

    def load_failures(self, attempt: int) -> list[FailureRecord]:
        """Return all failures noted in an attempt, in no particular order."""
        paths = sorted((self.folder / f"attempt-{attempt}").glob("*.json"))
        return [FailureRecord(**json.loads(path.read_bytes())) for path in paths]

    def last_attempt(self) -> int:
        """Return the number of the newest attempt that got as far as starting a rank."""
        return max((int(path.name.split("-")[1]) for path in self.folder.glob("attempt-*")), default=0)

    def count_attempts(self) -> int:
        """Return how many attempts got as far as starting a rank."""
        return len(list(self.folder.glob("attempt-*")))

    def start_attempt(self, attempt: int) -> None:
        """Make room for an attempt's notes."""
        (self.folder / f"attempt-{attempt}").mkdir(exist_ok=True)

    def save_result(self, attempt: int, rank: int, result: Any) -> None:
        """Keep what a rank's entry returned: plain values."""
        _write(self._of(attempt, rank, "result"), json.dumps(result).encode())

    def load_result(self, attempt: int, rank: int) -> Any:
        """Return what a rank's entry returned; None if it left without returning."""
        path = self._of(attempt, rank, "result")
        return json.loads(path.read_bytes()) if path.exists() else None

    def pulse(self, attempt: int, rank: int) -> Path:
        """The file in which a rank says where it is."""
        return self._of(attempt, rank, "pulse")

    def stacks(self, attempt: int, rank: int) -> Path:
        """The file that the stacks of a rank's processes are appended to."""
        return self._of(attempt, rank, "stacks")

    def watched_ranks(self, attempt: int) -> list[int]:
        """Return the ranks that have begun."""
        paths = (self.folder / f"attempt-{attempt}").glob("rank-*.pulse")
        return sorted(int(path.stem.removeprefix("rank-")) for path in paths)

    def _of(self, attempt: int, rank: int, kind: str) -> Path:
        return self.folder / f"attempt-{attempt}" / f"rank-{rank}.{kind}"


@contextlib.contextmanager
def open_scratch() -> Iterator[Scratch]:
    """Make the folder for one launch and hold its lifeline; at the end, cut that and remove the folder."""
    _sweep(Path(tempfile.gettempdir()))
    scratch = Scratch(Path(tempfile.mkdtemp(prefix="instep-")))
    try:
        (scratch.folder / "logs").mkdir()
        os.mkfifo(scratch.lifeline, 0o600)
        lifeline = os.open(scratch.lifeline, os.O_RDWR)  # not write-only: that would wait for a reader
        try:
            with taking_over(lambda: scratch.mark("asked")):
                yield scratch
        finally:
            os.close(lifeline)
    finally:
        shutil.rmtree(scratch.folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Remove the folders of launches that were killed: nobody holds their lifelines any more."""
    long_ago = time.time() - _NEW_S
    for lifeline in place.glob("instep-*/lifeline"):
        with contextlib.suppress(OSError):  # another launch sweeps too, or it is another user's
            status = lifeline.parent.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mtime > long_ago:
                continue
            try:
                os.close(os.open(lifeline, os.O_WRONLY | os.O_NONBLOCK))
            except OSError as error:
                if error.errno == errno.ENXIO:  # a FIFO that no process has open to read
                    shutil.rmtree(lifeline.parent, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    part.write_bytes(data)
    part.rename(path)
