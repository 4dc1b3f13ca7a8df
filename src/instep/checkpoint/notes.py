"""What the ranks that write one checkpoint leave for rank 0 in its scratch directory: a note each.

[Note: Writing together]
Every rank writes its files into the one scratch directory, syncs them, and leaves a note: their sizes and hashes, or
why it could not. Rank 0 writes its own, waits for the notes of the others, then writes what only one can: pieces.json,
state.json, the manifest, and the name that makes it a checkpoint. All this is done by threads beside the training, so
no collective may be used: the directory, which all ranks see, is what they speak through. Files that grow are a sign
of life; a rank that shows none for a while is given up, and with it this save, never the training.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from instep.checkpoint.layout import FileEntry
from instep.core.errors import CheckpointError, NumericsError

PATIENCE_S = 120.0
"""How long a rank may show no sign of life; file systems over a network may show one only after a minute."""
HURRY_S = 15.0
"""The same, after a failure that other ranks may not have survived."""
_LOOK_S = 0.02
_LONGEST_LOOK_S = 0.5


@dataclass(frozen=True)
class Note:
    """What a rank has to say of its share."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    skeletons: dict[str, Any] = field(default_factory=dict)
    """What of its state is no tensor, where rank 0 does not have it."""
    problem: Literal["", "disk", "weights", "other"] = ""
    text: str = ""
    number: int = 0
    """The operating system's, of a disk that refused."""

    def leave(self, directory: Path, rank: int) -> None:
        """Put the note where rank 0 looks for it, all at once."""
        content = {
            "files": {name: [entry.num_bytes, entry.sha256] for name, entry in self.files.items()},
            "skeletons": self.skeletons,
            "problem": self.problem,
            "text": self.text,
            "number": self.number,
        }
        path = _path(directory, rank)
        hidden = path.with_name(f".{path.name}")
        hidden.write_text(json.dumps(content))
        os.replace(hidden, path)

    @classmethod
    def read(cls, directory: Path, rank: int) -> Note | None:
        """Read a rank's note; None: there is none yet."""
        try:
            content = json.loads(_path(directory, rank).read_bytes())
        except FileNotFoundError:
            return None
        files = {name: FileEntry(int(size), str(sha256)) for name, (size, sha256) in content.pop("files").items()}
        return cls(files=files, **content)


class ShareFailed(OSError):
    """A rank could not write its share, or is not heard of."""

    def __init__(self, number: int, text: str, rank: int) -> None:
        super().__init__(number, text)
        self.rank = rank


class Patience:
    """How long rank 0 waits for a sign of life; it may lose it while it waits."""

    def __init__(self) -> None:
        self.limit_s = PATIENCE_S

    def hurry(self) -> None:
        """Wait no longer than a moment from here on."""
        self.limit_s = min(self.limit_s, HURRY_S)


def wait_for_notes(directory: Path, ranks: Iterable[int], patience: Patience) -> dict[int, Note]:
    """Give the notes of other ranks; raise what the first of them says that could not write its share."""
    missing, notes = set(ranks), dict[int, Note]()
    seen: dict[str, int] = {}
    moved, pause_s = time.monotonic(), _LOOK_S
    while missing:
        for rank in sorted(missing):
            note = Note.read(directory, rank)
            if note is not None:
                _raise_problem(note, rank)
                notes[rank] = note
                missing.discard(rank)
        now = _sizes(directory)
        if now != seen:
            seen, moved = now, time.monotonic()
        if missing and time.monotonic() - moved > patience.limit_s:
            first = min(missing)
            raise ShareFailed(errno.ETIMEDOUT, f"nothing was heard of it for {patience.limit_s:.0f} s", first)
        if missing:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _LONGEST_LOOK_S)
    return notes


def remove_notes(directory: Path, ranks: Iterable[int]) -> None:
    """Take the notes away: a checkpoint holds nothing that its manifest does not name."""
    for rank in ranks:
        _path(directory, rank).unlink()


def _raise_problem(note: Note, rank: int) -> None:
    if note.problem == "disk":
        raise ShareFailed(note.number, note.text, rank)
    if note.problem == "weights":
        raise NumericsError(note.text)
    if note.problem:
        raise CheckpointError(f"rank {rank} could not write its share of a checkpoint: {note.text}")


def _sizes(directory: Path) -> dict[str, int]:
    sizes = {}
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):  # a note that gets its name just now
            sizes[entry.name] = entry.stat().st_size
    return sizes


def _path(directory: Path, rank: int) -> Path:
    return directory / f"note-rank-{rank:05d}.json"
