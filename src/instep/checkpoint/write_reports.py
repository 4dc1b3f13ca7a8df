"""What the ranks that write one checkpoint together report to rank 0: a file each, in the scratch directory.

[Note: Writing together]
Every rank writes its files into the one scratch directory, syncs them, and leaves a report: their sizes and hashes, or
why it could not write them. Rank 0 writes its own files, waits for the reports of the others, then writes what only one
rank can: pieces.json, state.json, the manifest, and the name that makes the directory a checkpoint. All this happens in
threads beside the training, so no collective may be used: the ranks communicate through the directory, which all of
them see. Files that grow are a sign of life. If a rank shows none for a while, rank 0 gives up this save; training
continues.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal

from instep.checkpoint.manifest import FileEntry
from instep.core.errors import CheckpointError, NumericsError

TIMEOUT_S = 120.0
"""How long a rank may show no sign of life; a network file system may show one only after a minute."""
SHORT_TIMEOUT_S = 15.0
"""The same after a failure that other ranks may not have survived."""
_POLL_S, _LONGEST_POLL_S = 0.02, 0.5


@dataclass(frozen=True)
class WriteReport:
    """What one rank wrote of a checkpoint, or why it could not."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    skeletons: dict[str, Any] = field(default_factory=dict)
    """The parts of its state that are not tensors, if rank 0 does not have them."""
    problem: Literal["", "disk", "weights", "other"] = ""
    text: str = ""
    number: int = 0
    """The errno of a disk error."""

    def write(self, directory: Path, rank: int) -> None:
        """Write the report for rank 0, atomically."""
        content = {**vars(self), "files": {name: astuple(entry) for name, entry in self.files.items()}}
        path = _path(directory, rank)
        hidden = path.with_name(f".{path.name}")
        hidden.write_text(json.dumps(content))
        os.replace(hidden, path)

    @classmethod
    def read(cls, directory: Path, rank: int) -> WriteReport | None:
        """Read a rank's report; None if there is none yet."""
        try:
            content = json.loads(_path(directory, rank).read_bytes())
        except FileNotFoundError:
            return None
        content["files"] = {name: FileEntry(*entry) for name, entry in content["files"].items()}
        return cls(**content)

    def raise_problem(self, rank: int) -> None:
        """Raise the error of the rank that wrote this report, if there was one."""
        if self.problem == "disk":
            raise ShareFailed(self.number, self.text, rank)
        if self.problem == "weights":
            raise NumericsError(self.text)
        if self.problem:
            raise CheckpointError(f"rank {rank} could not write its share of a checkpoint: {self.text}")


class ShareFailed(OSError):
    """A rank could not write its share of a checkpoint, or showed no sign of life."""

    def __init__(self, number: int, text: str, rank: int) -> None:
        super().__init__(number, text)
        self.rank = rank


class WriteTimeout:
    """How long rank 0 waits for a sign of life; may become shorter while it waits."""

    def __init__(self) -> None:
        self.limit_s = TIMEOUT_S

    def shorten(self) -> None:
        """Wait only a short time from now on."""
        self.limit_s = min(self.limit_s, SHORT_TIMEOUT_S)


def wait_for_reports(directory: Path, ranks: Iterable[int], timeout: WriteTimeout) -> dict[int, WriteReport]:
    """Return the reports of other ranks, and delete them: a checkpoint holds only files that its manifest names.

    Raise the problem of the first rank that could not write its share.
    """
    missing, reports = set(ranks), dict[int, WriteReport]()
    sizes: dict[str, int] = {}
    moved, pause_s = time.monotonic(), _POLL_S
    while missing:
        for rank in sorted(missing):
            report = WriteReport.read(directory, rank)
            if report is not None:
                report.raise_problem(rank)
                reports[rank] = report
                missing.discard(rank)
        before, sizes = sizes, _file_sizes(directory)
        if sizes != before:
            moved = time.monotonic()
        if missing and time.monotonic() - moved > timeout.limit_s:
            raise ShareFailed(errno.ETIMEDOUT, f"no sign of life for {timeout.limit_s:.0f} s", min(missing))
        if missing:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _LONGEST_POLL_S)
    for rank in reports:
        _path(directory, rank).unlink()
    return reports


def _file_sizes(directory: Path) -> dict[str, int]:
    sizes = {}
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):  # a report that is being renamed
            sizes[entry.name] = entry.stat().st_size
    return sizes


def _path(directory: Path, rank: int) -> Path:
    return directory / f"note-rank-{rank:05d}.json"
