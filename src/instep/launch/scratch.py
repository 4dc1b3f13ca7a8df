"""The folder in which a launcher, its keepers and its workers exchange small files.

    lifeline                   a FIFO whose only writer is the launcher: when it closes, keepers and workers end
    asked, ending              the launcher was asked to stop; it ends everything now
    given-up                   a rank found that another attempt could only fail the same way
    logs/rank-1.json           rank 1's log files, and their sizes before this launch
    attempt-0/rank-1.keeper    the pid of rank 1's keeper, once it runs
    attempt-0/rank-1.json      how rank 1 failed, a FailureRecord
    attempt-0/rank-1.result    what rank 1's entry returned, as JSON
    attempt-0/rank-1.pulse     what rank 1 is doing, in shared memory
    attempt-0/rank-1.stacks    the stacks of rank 1's processes, each time they are asked for

There are no pickles: what to run travels in memory. Every file but the stacks, which are appended to, is written under
another name and renamed, so a reader never sees half of one.
"""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from instep.core.errors import FailureRecord
from instep.core.stop import taking_over
from instep.guard.pulse import Beat, read_pulse
from instep.launch.logs import LogStart
from instep.world.shared_memory import SHARED_MEMORY, remove_unused_folders

_MIN_AGE_S = 60.0
"""A folder younger than this may belong to a launch that has not opened its lifeline yet."""
SEMAPHORES = "instep-"
"""How the names of a launcher's semaphores begin; its PID namespace and its pid follow."""
Mark = Literal["asked", "ending", "given-up"]


@dataclass(frozen=True)
class Scratch:
    """The scratch folder of one launch."""

    folder: Path

    @property
    def lifeline(self) -> Path:
        """The FIFO that closes when the launcher ends."""
        return self.folder / "lifeline"

    def announce_logs(self, rank: int, starts: Sequence[LogStart]) -> None:
        """Record where a rank's output begins; later attempts append, so only the first one counts."""
        path = self.folder / "logs" / f"rank-{rank}.json"
        if not path.exists():
            _write(path, json.dumps(starts, default=dataclasses.asdict).encode())

    def announced_logs(self, known: Collection[str]) -> dict[str, list[LogStart]]:
        """Return where the ranks' output begins, by file name, without those in `known`."""
        return {
            path.name: [LogStart(**start) for start in json.loads(path.read_bytes())]
            for path in sorted((self.folder / "logs").glob("*.json"))
            if path.name not in known
        }

    def announce_keeper(self, attempt: int, rank: int, pid: int) -> None:
        """Record the keeper that forwards signals to a rank."""
        _write(self._of(attempt, rank, "keeper"), str(pid).encode())

    def mark(self, mark: Mark) -> None:
        """Set a mark that all processes of the launch see."""
        _write(self.folder / mark, b"")

    def is_marked(self, mark: Mark) -> bool:
        """Return whether a mark is set."""
        return (self.folder / mark).exists()

    def keepers(self, attempt: int) -> list[int]:
        """Return the pids of an attempt's keepers."""
        paths = sorted((self.folder / f"attempt-{attempt}").glob("*.keeper"))
        return [int(path.read_bytes()) for path in paths]

    def save_failure(self, attempt: int, record: FailureRecord) -> None:
        """Record how a rank failed."""
        _write(self._of(attempt, record.rank, "json"), json.dumps(dataclasses.asdict(record)).encode())

    def load_failure(self, attempt: int, rank: int) -> FailureRecord | None:
        """Return how a rank failed, if that is recorded."""
        path = self._of(attempt, rank, "json")
        return FailureRecord(**json.loads(path.read_bytes())) if path.exists() else None

    def drop_failure(self, attempt: int, rank: int) -> None:
        """Remove the record of a rank's failure."""
        self._of(attempt, rank, "json").unlink(missing_ok=True)

    def load_failures(self, attempt: int) -> list[FailureRecord]:
        """Return all failures recorded in an attempt, in no particular order."""
        paths = sorted((self.folder / f"attempt-{attempt}").glob("*.json"))
        return [FailureRecord(**json.loads(path.read_bytes())) for path in paths]

    def last_attempt(self) -> int:
        """Return the number of the newest attempt that started a rank; -1: none has."""
        return max((int(path.name.split("-")[1]) for path in self.folder.glob("attempt-*")), default=-1)

    def start_attempt(self, attempt: int) -> None:
        """Make the folder of an attempt."""
        (self.folder / f"attempt-{attempt}").mkdir(exist_ok=True)

    def save_result(self, attempt: int, rank: int, result: Any) -> None:
        """Record what a rank's entry returned: plain values."""
        _write(self._of(attempt, rank, "result"), json.dumps(result).encode())

    def load_result(self, attempt: int, rank: int) -> Any:
        """Return what a rank's entry returned; None if it exited without returning."""
        path = self._of(attempt, rank, "result")
        return json.loads(path.read_bytes()) if path.exists() else None

    def pulse(self, attempt: int, rank: int) -> Path:
        """Return the file in which a rank notes what it is doing."""
        return self._of(attempt, rank, "pulse")

    def beats(self, attempt: int) -> dict[int, Beat]:
        """Read the pulse of every rank that has started."""
        beats = {rank: read_pulse(self.pulse(attempt, rank)) for rank in self.watched_ranks(attempt)}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def stacks(self, attempt: int, rank: int) -> Path:
        """Return the file to which the stacks of a rank's processes are appended."""
        return self._of(attempt, rank, "stacks")

    def watched_ranks(self, attempt: int) -> list[int]:
        """Return the ranks that have started."""
        paths = (self.folder / f"attempt-{attempt}").glob("rank-*.pulse")
        return sorted(int(path.stem.removeprefix("rank-")) for path in paths)

    def _of(self, attempt: int, rank: int, kind: str) -> Path:
        return self.folder / f"attempt-{attempt}" / f"rank-{rank}.{kind}"


@contextlib.contextmanager
def scratch_in(parent: Path, prefix: str) -> Iterator[Scratch]:
    """Make the scratch folder of a launch; at the end, remove it."""
    scratch = Scratch(Path(tempfile.mkdtemp(prefix=prefix, dir=parent)))
    try:
        (scratch.folder / "logs").mkdir()
        with taking_over(lambda: scratch.mark("asked")):
            yield scratch
    finally:
        shutil.rmtree(scratch.folder, ignore_errors=True)


@contextlib.contextmanager
def open_scratch() -> Iterator[Scratch]:
    """Make the scratch folder of a launch on this node, and hold its lifeline open."""
    parent = Path(tempfile.gettempdir())
    _remove_orphans(parent)
    _remove_semaphores()
    remove_unused_folders()
    with scratch_in(parent, "instep-") as scratch:
        os.mkfifo(scratch.lifeline, 0o600)
        lifeline = os.open(scratch.lifeline, os.O_RDWR)  # not write-only: that would wait for a reader
        try:
            yield scratch
        finally:
            os.close(lifeline)
            remove_unused_folders()  # killed ranks have left theirs


def _remove_orphans(parent: Path) -> None:
    """Remove the folders of launches that were killed: no process holds their lifelines open any more."""
    max_mtime = time.time() - _MIN_AGE_S
    for lifeline in parent.glob("instep-*/lifeline"):
        with contextlib.suppress(OSError):  # another launch removes it too, or it is another user's
            status = lifeline.parent.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mtime > max_mtime:
                continue
            try:
                os.close(os.open(lifeline, os.O_WRONLY | os.O_NONBLOCK))
            except OSError as error:
                if error.errno == errno.ENXIO:  # a FIFO that no process has open to read
                    shutil.rmtree(lifeline.parent, ignore_errors=True)


def pid_namespace() -> str:
    """Return the number of this process's PID namespace: containers may share /dev/shm, and not their pids."""
    return str(os.stat("/proc/self/ns/pid").st_ino) if sys.platform == "linux" else "0"


def _remove_semaphores() -> None:
    """Remove the semaphores of launchers that were killed together with the process that would have removed them."""
    max_mtime = time.time() - _MIN_AGE_S
    for path in SHARED_MEMORY.glob(f"sem.{SEMAPHORES}*"):  # where the C library keeps them
        namespace, _, rest = path.name.removeprefix(f"sem.{SEMAPHORES}").partition("-")
        pid = rest.partition("-")[0]
        with contextlib.suppress(OSError):
            if (
                namespace == pid_namespace()
                and pid.isdigit()
                and path.lstat().st_mtime < max_mtime
                and not Path(f"/proc/{pid}").exists()
            ):
                path.unlink()


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    part.write_bytes(data)
    part.rename(path)
