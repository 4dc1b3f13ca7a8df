"""The event logs of all ranks of a run, read as they grow.

Whatever shows a run reads it here: `explain`, `report`, `watch`. A log may be damaged (a disk was full, a machine
crashed, a process was killed while it wrote): its good lines are read, and the others are named.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from instep.core.errors import SpecError
from instep.core.plural import plural
from instep.events.read import EventTail, path_of
from instep.events.repeats import Repeats
from instep.events.schema import RECORDS

_RANK_FILE = re.compile(r"rank-(\d+)\.jsonl")
_NAMED_LINES = 5
_NAMED_RUNS = 5
_DICT = re.compile(r"dict\[str, (\w+)\]")
_NUMBER = (int, float)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": _NUMBER,
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}
"""The types that JSON has for those that the schema's fields are declared with."""


class RankEvent(NamedTuple):
    """One event, and the rank that wrote it."""

    rank: int
    event: dict[str, Any]


@dataclass(frozen=True)
class DamagedLine:
    """A line of a log that cannot be read; `line` 0 is the whole file."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" if self.line else f"{self.path}"
        return f"{where}: {self.reason}"


class RunLog:
    """Reads the logs of a run; each `poll` yields what is new.

    A step that a restart made again, its evaluation, its checkpoint and the end of its epoch are yielded once: as the
    attempt that came first wrote them, unless `repeats` asks for all. Events that are not of a step (`start`, `phases`,
    `notice`, …) are all yielded: a second that was spent again was spent. The kinds `without` are not read at all.
    """

    def __init__(self, run_dir: Path, repeats: bool = False, without: Iterable[str] = ()) -> None:
        check_run(run_dir)
        self.run_dir = run_dir
        self._without = tuple(without)
        self.damaged: list[DamagedLine] = []
        """The lines that could not be read so far."""
        self.generation = 0
        """How often the logs were replaced (`--fresh`): all that was read before belongs to another run."""
        self._repeats = repeats
        self._ranks: dict[int, _RankLog] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose logs were found by the last `poll`."""
        return tuple(sorted(self._ranks))

    def poll(self) -> Iterator[RankEvent]:
        """Yield the new events: rank by rank, those of a rank in the order in which it wrote them."""
        self._find()
        for rank, log in sorted(self._ranks.items()):
            num_damaged = len(log.damaged)
            for event in log.poll():
                if self._repeats or not log.repeats.is_repeated(event):
                    yield RankEvent(rank, event)
            self.damaged += log.damaged[num_damaged:]

    def damage_text(self) -> str | None:
        """Return a sentence that names the damaged lines; None: there are none."""
        return damage_text(self.damaged)

    def _find(self) -> None:
        """Find the logs of ranks that joined, and forget all of a run that another one replaced."""
        if any(log.was_replaced() for log in self._ranks.values()):
            self.generation += 1
            self._ranks, self.damaged = {}, []
        for rank in _ranks_in(self.run_dir):
            if rank not in self._ranks:
                self._ranks[rank] = _RankLog(path_of(self.run_dir, rank), self._without)


class _RankLog:
    """One rank's log."""

    def __init__(self, path: Path, without: tuple[str, ...]) -> None:
        self.path = path
        self.damaged: list[DamagedLine] = []
        self._tail = EventTail(path, without)
        self._num_damaged = 0
        self._inode, self._num_bytes = _identity(path)
        self.repeats = Repeats()

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the new events that are what the schema says, and note the lines that are not."""
        try:
            for event in self._tail.poll():
                if (reason := fault_of(event)) is None:
                    yield event
                else:
                    self._note(self._tail.line, reason)
        except OSError as error:  # no permission, or the file system fails: another poll may read on
            if not any(damage.line == 0 for damage in self.damaged):
                self._note(0, f"cannot be read ({error.strerror or error})")
        for line in self._tail.damaged[self._num_damaged :]:
            self._note(line, "is no JSON object")
        self._num_damaged = len(self._tail.damaged)
        self._inode, self._num_bytes = _identity(self.path)

    def was_replaced(self) -> bool:
        """Return whether the file is another one than at the last poll, or lost its end; logs only grow."""
        inode, num_bytes = _identity(self.path)
        return inode != self._inode or num_bytes < self._num_bytes

    def _note(self, line: int, reason: str) -> None:
        self.damaged.append(DamagedLine(self.path, line, reason))


def check_run(run_dir: Path) -> None:
    """Raise SpecError unless a directory is that of a run: it has events, or a spec.json."""
    if not run_dir.exists():
        raise SpecError(f"{run_dir} does not exist. Give the directory of a run, runs/… for instance.")
    if not run_dir.is_dir():
        raise SpecError(f"{run_dir} is a file, and a run is a directory. Give the directory, runs/… for instance.")
    if (run_dir / "spec.json").is_file() or _ranks_in(run_dir):
        return
    inside = runs_in(run_dir)
    if not inside:
        raise SpecError(f"{run_dir} is not a run: it has neither events/rank-0.jsonl nor spec.json.")
    names = ", ".join(path.name for path in inside[:_NAMED_RUNS]) + (", …" if len(inside) > _NAMED_RUNS else "")
    raise SpecError(f"{run_dir} is not a run, but contains {plural(len(inside), 'run')}: {names}. Give one of them.")


def runs_in(folder: Path) -> list[Path]:
    """Return the directories of runs in a folder, the newest first."""
    runs = [path for path in folder.iterdir() if path.is_dir() and path_of(path).exists()]
    return sorted(runs, key=lambda path: path_of(path).stat().st_mtime, reverse=True)


def damage_text(damaged: Iterable[DamagedLine]) -> str | None:
    """Return a sentence that names damaged lines by file; None: there are none."""
    by_file: dict[tuple[Path, str], list[int]] = {}
    for damage in damaged:
        by_file.setdefault((damage.path, damage.reason), []).append(damage.line)
    if not by_file:
        return None
    texts = [_file_text(path, lines, reason) for (path, reason), lines in by_file.items()]
    return "; ".join(texts) + ". The rest of the log is shown."


def _file_text(path: Path, lines: list[int], reason: str) -> str:
    if lines == [0]:
        return f"{path} {reason}"
    named = ", ".join(str(line) for line in lines[:_NAMED_LINES])
    more = f" and {len(lines) - _NAMED_LINES} more" if len(lines) > _NAMED_LINES else ""
    word = "line" if len(lines) == 1 else "lines"
    return f"{path}: {word} {named}{more} left out ({reason})"


def _ranks_in(run_dir: Path) -> list[int]:
    events = run_dir / "events"
    if not events.is_dir():
        return []
    matches = (_RANK_FILE.fullmatch(path.name) for path in events.iterdir())
    return sorted(int(match[1]) for match in matches if match is not None)


def _identity(path: Path) -> tuple[int, int]:
    """Return what tells a file from another one of its name: its inode, and its size, which only grows."""
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return stat.st_ino, stat.st_size


def fault_of(event: Mapping[str, Any]) -> str | None:
    """Return what an event lacks of what the schema says of its kind; None: nothing, or the kind is not known."""
    kind = event.get("event")
    if not isinstance(kind, str):
        return "names no event"
    if not isinstance(event.get("time"), _NUMBER):
        return f"{_a(kind)} event without a time"
    for field in _FIELDS.get(kind, ()):
        if field.name not in event:
            if not field.is_required:
                continue
            return f"{_a(kind)} event without {field.name}"
        if not field.admits(event[field.name]):
            return f"{_a(kind)} event whose {field.name} is {event[field.name]!r:.40}"
    return None


def _a(word: str) -> str:
    return f"an {word}" if word[:1] in "aeiou" else f"a {word}"


class _Field(NamedTuple):
    """A field of a kind of events, which an event may lack if it has a default; for a dict, its values' types, too."""

    name: str
    types: tuple[type, ...]
    value_types: tuple[type, ...]
    is_required: bool

    def admits(self, value: Any) -> bool:
        """Return whether a value is of the field's type."""
        if self.value_types and isinstance(value, dict):
            return all(isinstance(item, self.value_types) for item in value.values())
        return isinstance(value, self.types)


def _fields(record: type[Any]) -> tuple[_Field, ...]:
    return tuple(
        _field(f.name, str(f.type), f.default is f.default_factory is dataclasses.MISSING)
        for f in dataclasses.fields(record)
    )


def _field(name: str, annotation: str, is_required: bool) -> _Field:
    if (match := _DICT.fullmatch(annotation)) is not None:
        return _Field(name, (dict,), _TYPES[match[1]], is_required)
    types = [kind for word in annotation.split(" | ") for kind in _TYPES[word]]
    return _Field(name, tuple(types), (), is_required)


_FIELDS = {kind: _fields(record) for kind, record in RECORDS.items()}
