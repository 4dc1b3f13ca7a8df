"""The trace of one rank, and of all of them, in the format of Chrome and Perfetto.

[Note: One clock]
torch's profiler writes microseconds since `baseTimeNanoseconds`, by the wall clock of its node. Here the times of all
ranks are microseconds since one moment, `base_ns`, and a node's clock is corrected by how far it is ahead of rank 0's.
So traces of several ranks can be opened side by side, or merged, and a collective lies where it was on each of them.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MERGED = "trace.json.gz"
RANK_SUFFIX = ".trace.json.gz"
PHASE_PREFIX = "instep."
STEP_TRACK = "steps"
_KEY = "instep"
_NOT_PROCESSES = ("Traces", "Spans", "")
"""Of torch's own marks, which say nothing about the training."""

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TraceInfo:
    """What a rank's trace is of."""

    rank: int
    world_size: int
    host: str
    pid: int
    device: str
    asked: str
    """The value of `--profile`."""
    first: int
    """The first step that was recorded."""
    last: int
    base_ns: int
    """The moment from which times are counted ([Note: One clock])."""
    ahead_ns: int = 0
    """How far the node's clock is ahead of rank 0's; the times are corrected by it."""
    doubt_ns: int = 0
    """The true offset is at most this far away."""
    is_whole: bool = False
    """Whether all steps were recorded that were to be; not if the rank failed within them."""
    memory_step: int | None = None
    """The step that was recorded with its memory; None: there was none left."""
    memory_from_us: float | None = None
    """When that began."""
    holders: list[dict[str, Any]] = field(default_factory=list)
    """What holds memory between two steps, the largest first."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the summary."""

    @property
    def num_steps(self) -> int:
        """The number of steps whose operations were recorded."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class RankTrace:
    """A rank's trace."""

    info: TraceInfo
    events: list[Event]

    def timed(self) -> list[Event]:
        """Return the events of the steps that were recorded for their times."""
        until = self.info.memory_from_us
        return self.events if until is None else [event for event in self.events if event.get("ts", 0.0) < until]

    def with_memory(self) -> list[Event]:
        """Return the events of the step that was recorded with its memory."""
        since = self.info.memory_from_us
        return [] if since is None else [event for event in self.events if event.get("ts", 0.0) >= since]


def aligned(raw: Mapping[str, Any], base_ns: int, ahead_ns: int) -> list[Event]:
    """Return the events of a trace by torch, with times on the common clock ([Note: One clock])."""
    # In integers: nanoseconds since 1970 are more than a float can hold.
    shift_us = (int(raw.get("baseTimeNanoseconds", 0)) - base_ns - ahead_ns) / 1000
    events = []
    for event in raw.get("traceEvents", ()):
        if event.get("pid") in _NOT_PROCESSES or event.get("cat") == "Trace":
            continue
        moved = dict(event)
        if event.get("ph") == "M":
            moved.pop("ts", None)
        elif "ts" in event:
            moved["ts"] = round(float(event["ts"]) + shift_us, 3)
        events.append(moved)
    return events


def named(events: Iterable[Event], info: TraceInfo) -> list[Event]:
    """Return events in which the processes have the name of the rank; of torch's, only the host's has a number as pid.

    A device's events have the device's number as pid, so that those of several ranks would be one process.
    """
    events = list(events)
    pids = {e["pid"] for e in events if e.get("ph") != "M" and "pid" in e}
    # Kineto also names devices that did nothing.
    kept = [
        e for e in events if e.get("ph") != "M" or (e.get("pid") in pids and not str(e["name"]).startswith("process_"))
    ]
    labels: list[Event] = []
    for pid in sorted(pids, key=lambda pid: (pid != info.pid, str(pid))):
        name = f"rank {info.rank}" + ("" if pid == info.pid else f", device {pid}")
        labels.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        labels.append({"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": info.host}})
        order = 100 * info.rank + (0 if pid == info.pid else 1)
        labels.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}})
    return labels + kept


def step_events(steps: Iterable[tuple[int, int, int]], info: TraceInfo) -> list[Event]:
    """Return a track with one slice for each step: its number, when it began and ended, in nanoseconds since 1970."""
    origin_ns = info.base_ns + info.ahead_ns
    name = {"ph": "M", "name": "thread_name", "pid": info.pid, "tid": 0, "args": {"name": STEP_TRACK}}
    slices = [
        {
            "ph": "X",
            "cat": STEP_TRACK,
            "name": f"step {number}",
            "pid": info.pid,
            "tid": 0,
            "ts": (begin_ns - origin_ns) / 1000,
            "dur": (end_ns - begin_ns) / 1000,
        }
        for number, begin_ns, end_ns in steps
    ]
    return [name, *slices] if slices else []


def write_trace(folder: Path, trace: RankTrace) -> Path:
    """Write a rank's trace; a reader sees all of it or none."""
    path = folder / f"rank-{trace.info.rank}{RANK_SUFFIX}"
    _write(path, trace.events, {_KEY: dataclasses.asdict(trace.info)})
    return path


def read_trace(path: Path) -> RankTrace:
    """Read a rank's trace; raise ValueError if it is none."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            content = json.load(file)
        return RankTrace(TraceInfo(**content[_KEY]), list(content["traceEvents"]))
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def write_merged(folder: Path, traces: Sequence[RankTrace]) -> Path:
    """Write one trace of all ranks, in which no two have a process or a flow in common."""
    path = folder / MERGED
    _write(path, merge(traces), {})
    return path


def merge(traces: Sequence[RankTrace]) -> list[Event]:
    """Return the events of all ranks; processes and flows get numbers that are unique."""
    pids: dict[tuple[int, Any], int] = {}
    flows: dict[tuple[int, Any, Any], int] = {}
    numbers = itertools.count(1)
    events = []
    for trace in traces:
        rank = trace.info.rank
        for event in trace.events:
            renamed = dict(event)
            if "pid" in event:
                renamed["pid"] = pids.setdefault((rank, event["pid"]), len(pids) + 1)
            if event.get("ph") in ("s", "t", "f") and "id" in event:
                key = (rank, event.get("cat"), event["id"])
                if key not in flows:
                    flows[key] = next(numbers)
                renamed["id"] = flows[key]
            events.append(renamed)
    return events


def _write(path: Path, events: list[Event], more: Mapping[str, Any]) -> None:
    content = {"schemaVersion": 1, "displayTimeUnit": "ms", **more, "traceEvents": events}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with gzip.open(part, "wt", compresslevel=3, encoding="utf-8") as file:
            file.write(json.dumps(content, separators=(",", ":")))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
