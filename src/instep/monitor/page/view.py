"""A run as the page shows it, folded from its event logs: tables of numbers, marks, phases, and where it stands."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from instep.core.plural import plural
from instep.events.read import last_step, path_of
from instep.monitor.bottleneck.verdict import Evidence
from instep.monitor.page.logs import hang_sentences
from instep.monitor.page.marks import MarkFold
from instep.monitor.page.phase_sums import PhaseSums
from instep.monitor.page.preview import LONG_BYTES, preview
from instep.monitor.page.speed import Speed
from instep.monitor.page.table import Cursor, Table
from instep.monitor.run_files import read_options
from instep.monitor.run_log import RankEvent, RunLog

CHARTED_RANKS = 64
"""Charts with a line for each rank show those below this one."""
MAX_MARKS = 2000
"""The newest marks that a page gets when it is opened."""
_CLOCK_CHECK = 64
_SENSORS = ("utilisation", "power_w", "temperature_c")
_DEVICE_MEMORY = ("device_bytes", "device_reserved_bytes", "device_peak_bytes")


class RunView:
    """Follows one run. `advance` reads, `message` says what is new to somebody; both may be called by any thread."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._log = RunLog(run_dir, repeats=True)
        self._lock = threading.Lock()
        self._next_poll_s = 0.0
        self._generation = 0
        self._begin()

    def _begin(self) -> None:
        self.id = secrets.token_hex(4)
        self._reading: Iterator[RankEvent] | None = None
        self._is_read = False
        self._tables: dict[str, Table] = {name: Table() for name in ("train", "eval", "epoch", "speed")}
        self._marks, self._phases = MarkFold(lambda: hang_sentences(self.run_dir)), PhaseSums()
        self._evidence = Evidence()
        self._facts: dict[str, Any] = {"step": 0, "status": "starting"}
        self._origin_s: float | None = None
        self._speed = Speed()
        self._hosts: dict[int, str] = {}
        self._num_odd = 0

    @property
    def is_reading(self) -> bool:
        """Whether the last `advance` left something to read."""
        return self._reading is not None

    @property
    def is_long(self) -> bool:
        """Whether reading the log takes so long that a preview comes first."""
        path = path_of(self.run_dir)
        return not self._is_read and path.exists() and path.stat().st_size > LONG_BYTES

    def advance(self, budget_s: float, every_s: float = 0.0) -> None:
        """Read what is new, for about so long; not more often than every `every_s`, whoever asks."""
        with self._lock:
            now = time.monotonic()
            if self._reading is None:
                if now < self._next_poll_s:
                    return
                self._next_poll_s = now + every_s
                self._reading = self._log.poll()
            deadline = now + budget_s
            for number, (rank, event) in enumerate(self._reading):
                if self._generation != self._log.generation:
                    self._generation, reading = self._log.generation, self._reading
                    self._begin()
                    self._reading = reading
                self._take_if_sound(rank, event)
                if number % _CLOCK_CHECK == 0 and time.monotonic() > deadline:
                    return
            self._reading = None
            self._is_read = True

    def message(self, cursor: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return what is new to somebody with this cursor, and the next cursor; None: nothing is."""
        with self._lock:
            if not self._is_read:
                return self._preview() if cursor is None and self.is_long else None
            is_known = cursor is not None and cursor.get("view") == self.id
            had: Mapping[str, Any] = cursor if cursor is not None and is_known else {}
            tables = {name: table.since(_cursor_of(had, name), self.origin_s) for name, table in self._tables.items()}
            first_mark = had.get("marks", max(0, len(self._marks.marks) - MAX_MARKS))
            changes = {
                "tables": {name: change for name, change in tables.items() if change is not None},
                "marks": [mark.to_json(self.origin_s) for mark in self._marks.marks[first_mark:]],
                "phases": {
                    rank: {**sums, "host": self._hosts.get(rank, "")}
                    for rank, sums in self._phases.since(had.get("phases", 0)).items()
                },
                "damaged": self._damage_text() if self._num_damaged > had.get("damaged", 0) else None,
            }
            if is_known and not any(changes.values()):
                return None
            return {"reset": not is_known, "cursor": self._cursor(), "origin_s": self.origin_s, **changes}

    def window(self, first_step: float, last_step: float) -> dict[str, Any]:
        """Return finer buckets of the tables between two steps."""
        with self._lock:
            return {name: table.window(first_step, last_step, self.origin_s) for name, table in self._tables.items()}

    def facts(self) -> dict[str, Any]:
        """Return where the run stands: its newest numbers, to the last digit of the log."""
        with self._lock:
            facts = dict(self._facts)
            facts["num_restarts"] = self._marks.num_restarts
            facts |= {name: self._tables["speed"].last(name) for name in ("samples_per_s", "tokens_per_s")}
            facts["left_s"] = self._left_s()
            facts["is_complete"] = (self.run_dir / "result.json").exists()
            return facts

    def verdict(self) -> dict[str, Any] | None:
        """Return what bounded the run's speed, as far as it is read; None: its log does not say."""
        with self._lock:
            bottleneck = self._evidence.bottleneck(read_options(self.run_dir)) if self._is_read else None
            return None if bottleneck is None else bottleneck.to_json()

    def progress(self) -> float | None:
        """Return how much of a long log is read; None: all of it."""
        if not self.is_long:
            return None
        return min(float(self._facts["step"]) / max(last_step(self.run_dir) or 1, 1), 0.99)

    @property
    def origin_s(self) -> float:
        """When the run began: times are sent as seconds since then."""
        return self._origin_s or 0.0

    def _cursor(self) -> dict[str, Any]:
        tables = {name: list(table.cursor) for name, table in self._tables.items() if len(table)}
        counts = {
            "marks": len(self._marks.marks),
            "phases": self._phases.num_records,
            "damaged": self._num_damaged,
        }
        return {"view": self.id, "tables": tables, **counts}

    def _preview(self) -> dict[str, Any]:
        table = preview(path_of(self.run_dir))
        origin_s = self._origin_s or table.first_time_s
        buckets = table.since(Cursor(), origin_s)
        tables = {} if buckets is None else {"train": buckets}
        cursor = {"view": "", "tables": {}}
        nothing = {"marks": list[Any](), "phases": dict[int, Any](), "damaged": None}
        return {"reset": True, "cursor": cursor, "origin_s": origin_s, "tables": tables, **nothing}

    @property
    def _num_damaged(self) -> int:
        return len(self._log.damaged) + self._num_odd

    def _damage_text(self) -> str:
        odd = f"{plural(self._num_odd, 'event')} left out, whose values are none of a run." if self._num_odd else ""
        return " ".join(text for text in (self._log.damage_text(), odd) if text)

    def _take_if_sound(self, rank: int, event: dict[str, Any]) -> None:
        """Take an event in; one that is sound JSON with the right fields may still hold what no run writes."""
        try:
            self._take(rank, event)
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError):
            self._num_odd += 1

    def _take(self, rank: int, event: dict[str, Any]) -> None:
        if self._origin_s is None:
            self._origin_s = event["time"]
        kind = event["event"]
        if kind == "step":
            if rank == 0:
                self._take_step(event)
            return
        self._marks.take(rank, event, self._facts["step"])
        self._evidence.take(rank, event)
        if kind == "phases":
            self._take_phases(rank, event)
        elif kind == "device" and rank < CHARTED_RANKS:
            self._append(f"rank/{rank}", event, {name: event.get(name) for name in _SENSORS}, again=False)
        elif kind == "start":
            self._take_start(rank, event)
        elif rank == 0:
            self._take_main(kind, event)

    def _take_step(self, event: dict[str, Any]) -> None:
        step, time_s = event["step"], event["time"]
        values = {"loss": event["loss"], "lr": event["lr"], "grad_norm": event.get("grad_norm")}
        if scalars := event.get("scalars"):
            values |= {f"scalars/{name}": value for name, value in scalars.items()}
        if (newest := self._tables["train"].last_step) is not None and step <= newest:
            for table in self._tables.values():
                table.rewind(step)
        self._tables["train"].append(step, time_s, values)
        self._marks.seen(time_s, step)
        self._facts.update(step=step, epoch=event["epoch"], time_s=time_s, values=values)
        if (speed := self._speed.take(event)) is not None:
            self._tables["speed"].append(step, time_s, speed)

    def _take_start(self, rank: int, event: dict[str, Any]) -> None:
        self._hosts[rank] = event["host"]
        if rank == 0:
            self._speed = Speed()
            names = ("world_size", "device", "backend", "launcher", "versions", "attempt")
            self._facts |= {name: event[name] for name in names} | {"status": "training", "time_s": event["time"]}
            self._facts.pop("error", None)

    def _take_main(self, kind: str, event: dict[str, Any]) -> None:
        """Take an event of rank 0 in that describes the whole run."""
        if kind == "plan":
            names = ("task", "strategy", "num_steps", "num_epochs", "batch_size", "num_samples", "num_parameters")
            self._facts |= {name: event[name] for name in names}
        elif kind == "eval":
            self._append("eval", event, event["metrics"])
            self._facts["metrics"] = event["metrics"]
            self._speed.leave_out(event["seconds"])  # it is that of the training alone
        elif kind == "epoch":
            scalars = {f"scalars/{name}": value for name, value in event.get("scalars", {}).items()}
            self._append("epoch", event, {"loss": event["loss"], **scalars})
        elif kind == "memory" and not self._phases.num_records:
            memory = {name: event.get(name) for name in ("host_bytes", "device_bytes")}
            self._append("rank/0", event, memory)
        elif kind == "flops":
            speeds = {name: float(event[name]) for name in ("flops_per_s", "device_flops_per_s")}
            self._facts |= speeds
        elif kind == "end":
            self._facts |= {"status": event["status"], "error": event.get("error", "")}
        self._facts["time_s"] = event["time"]

    def _take_phases(self, rank: int, event: dict[str, Any]) -> None:
        self._phases.take(rank, event)
        if rank >= CHARTED_RANKS:
            return
        cores = event.get("cpu_s", 0.0) / event["seconds"] if event["seconds"] > 0 else None
        of_device = {name: event.get(name) for name in _DEVICE_MEMORY}
        rate = event.get("comm_bytes", 0) / event["seconds"] if event["seconds"] > 0 else 0.0
        values = {"host_bytes": event.get("host_bytes") or None, **of_device, "cores": cores}
        values |= {"queue": event.get("queue"), "comm_bytes_per_s": rate or None}
        self._append(f"rank/{rank}", event, values, again=False)

    def _append(
        self, name: str, event: Mapping[str, Any], values: Mapping[str, float | None], again: bool = True
    ) -> None:
        """Add a row to a table. `again`: a row of the same step takes the place of an earlier one."""
        table = self._tables.setdefault(name, Table())
        table.rewind(event["step"] if again else event["step"] + 1)
        table.append(event["step"], event["time"], values)

    def _left_s(self) -> float | None:
        speed, batch_size = self._tables["speed"].last("samples_per_s"), self._facts.get("batch_size")
        if not speed or not batch_size or self._facts["status"] != "training":
            return None
        return float((self._facts["num_steps"] - self._facts["step"]) * batch_size / speed)


def _cursor_of(had: Mapping[str, Any], name: str) -> Cursor:
    return Cursor(*had.get("tables", {}).get(name, ()))
