"""Read a rank's log, also while it is being written."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 2**22


def path_of(run_dir: Path, rank: int = 0) -> Path:
    """Return the path of a rank's events."""
    return run_dir / "events" / f"rank-{rank}.jsonl"


def read_events(run_dir: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return all events that a rank has written so far."""
    return list(EventTail(path_of(run_dir, rank)).poll())


def last_step(run_dir: Path, tail_bytes: int = 2**16) -> int | None:
    """Return the last step in rank 0's log; None: there is none."""
    for event in _newest_first(run_dir, tail_bytes):
        step = event.get("step")
        if isinstance(step, int):
            return step
    return None


def was_stopped(run_dir: Path) -> bool:
    """Return whether the run's Task asked to stop it, as rank 0's log says in the end."""
    return next((event.get("stopped") is True for event in _newest_first(run_dir) if event["event"] == "end"), False)


def _newest_first(run_dir: Path, tail_bytes: int = 2**16) -> Iterator[dict[str, Any]]:
    """Yield the newest events of rank 0, the last one first."""
    path = path_of(run_dir)
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - tail_bytes))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):  # cut off at the beginning, or still being written
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                yield event


class EventTail:
    """Follows a log: each poll returns the events since the last one.

    Those of the kinds `without` are left out; their lines are not parsed, which makes a long log quick to read.
    """

    def __init__(self, path: Path, without: Iterable[str] = ()) -> None:
        self._path = path
        self._skipped = tuple(f'{{"event": "{kind}",'.encode() for kind in without)
        self._offset = 0
        self._rest = b""
        self.line = 0
        """The number of the line that was read last, counted from 1; its event is the one that `poll` yielded last."""
        self.damaged: list[int] = []
        """The numbers of the lines that are no JSON object; empty lines are not counted."""

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the new events; a line that is still being written comes with a later poll."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while data := file.read(_CHUNK_BYTES):
                self._offset += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                yield from self._parse(lines)

    def _parse(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        """Yield the events of whole lines, and note the lines that are none."""
        first = self.line + 1
        wanted = [
            (number, line)
            for number, line in enumerate(lines, first)
            if line and not (self._skipped and line.startswith(self._skipped))
        ]
        for (number, line), event in zip(wanted, _values([line for _, line in wanted]), strict=True):
            self.line = number
            if isinstance(event, dict):
                yield event
            elif line.strip():
                self.damaged.append(number)
        self.line = first + len(lines) - 1


def _values(lines: list[bytes]) -> Iterable[Any]:
    """Return the value of each line, None for what is no JSON; many lines are parsed together, in half the time."""
    if all(line.startswith(b"{") for line in lines):
        try:
            values = json.loads(b"[" + b",".join(lines) + b"]")
            if len(values) == len(lines):
                return list(values)
        except (ValueError, RecursionError):
            pass  # one of them is damaged
    return map(_value, lines)


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # the torn last line of a process that was killed while it wrote
        return None
