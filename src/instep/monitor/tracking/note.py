"""What the run directory knows about a tracker (`trackers/NAME.json`, written after every send), and who sends."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from instep.monitor.tracking.rows import Position


@dataclass(frozen=True, kw_only=True)
class TrackerNote:
    """How far a tracker is with a run, and what it needs to continue."""

    key: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    identity: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    num_events: int = 0
    """Of the log, taken in."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """The newest one sent, by kind."""
    num_incidents: int = 0
    status: str = ""
    """How the run had ended when the tracker finished last."""

    @property
    def position(self) -> Position:
        """Where to continue, if the backend cannot be asked."""
        return Position(self.num_events, self.steps)

    @classmethod
    def read(cls, run_dir: Path, name: str) -> TrackerNote:
        """Return the note of a tracker; a new one, if there is none that can be read."""
        try:
            data = json.loads(_path(run_dir, name).read_bytes())
            return cls(**{field.name: data[field.name] for field in dataclasses.fields(cls)})
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def write(self, run_dir: Path, name: str) -> None:
        """Replace the note. It is complete or the old one, also after a kill."""
        path = _path(run_dir, name)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(json.dumps(dataclasses.asdict(self)))
        os.replace(temporary, path)


def _path(run_dir: Path, name: str) -> Path:
    return run_dir / "trackers" / f"{name}.json"


@contextlib.contextmanager
def sole_sender(run_dir: Path, name: str) -> Iterator[bool]:
    """Try to become the only process that sends a run to this tracker, for the block; yield whether it worked."""
    path = run_dir / "trackers" / f"{name}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
