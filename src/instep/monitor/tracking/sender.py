"""Send a run's events to one tracker: read the log, fold it into rows, send them, note how far it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.events.read import EventTail, path_of
from instep.monitor.tracking.note import TrackerNote
from instep.monitor.tracking.rows import History, Position, Rewind, RowFold
from instep.monitor.tracking.tracker import NONE, Outcome, Row, TrackedRun, Tracker

BATCH_ROWS = 500
Report = Callable[..., None]
"""Called with `busy=True` before a send, and with `step` and `last_step` after it."""


class Sender:
    """Follows the log of a run for one tracker; `advance` sends what is new, `finish` the rest and the outcome."""

    def __init__(self, run_dir: Path, name: str, make: Callable[[TrackedRun], Tracker], report: Report) -> None:
        self._run_dir, self._name, self._make, self._report = run_dir, name, make, report
        self._note = TrackerNote.read(run_dir, name)
        self._tail = EventTail(path_of(run_dir))
        self._history = History(EventTail(path_of(run_dir)).poll())
        self._tracker: Tracker | None = None
        self._early: list[dict[str, Any]] = []
        """Events before the run's plan: until then there may be no spec.json."""
        self._fold: RowFold | None = None
        self._batch: list[Row] = []

    @property
    def where(self) -> str:
        """What a person opens to see the numbers."""
        return self._note.where

    @property
    def is_open(self) -> bool:
        """Whether the tracker is open: the run's plan was there."""
        return self._tracker is not None

    @property
    def is_done(self) -> bool:
        """Whether everything was sent by an earlier process, and nothing has happened since."""
        status = outcome_of(self._run_dir, None).status
        same = self._note.status == status or (status == "unfinished" and self._note.status)
        return bool(same) and self._note.num_events == self._history.num_events and _is_there(self._note.where)

    def advance(self) -> None:
        """Send what is new in the log."""
        for event in self._tail.poll():
            if self._fold is None:
                self._early.append(event)
                if event.get("event") == "plan":
                    self._open()
                continue
            self._take(event)
        self._send()

    def finish(self) -> None:
        """Send the rest, and how the run has ended."""
        self.advance()
        if self._fold is None and self._early:  # it has ended before it had a plan
            self._open()
        if self._fold is None or self._tracker is None:
            return
        self._batch += self._fold.flush()
        self._send()
        outcome = outcome_of(self._run_dir, self._fold.last_end)
        self._report(busy=True)
        self._tracker.finish(outcome)
        self._write_note(status=outcome.status)

    def _open(self) -> None:
        self._report(busy=True)
        task, values = hyperparameters(self._run_dir)
        self._tracker = self._make(
            TrackedRun(
                path=self._run_dir.absolute(),
                task=task,
                hyperparameters=values,
                key=self._note.key,
                identity=self._note.identity,
            )
        )
        is_same = self._note.identity == self._tracker.identity
        steps = {**self._note.steps, **self._tracker.sent()} if is_same else {}
        has_rows = max(steps.values(), default=NONE) > NONE  # else it is new, or somebody has deleted what it had
        num_events, num_incidents = (self._note.num_events, self._note.num_incidents) if has_rows else (0, 0)
        identity, where = self._tracker.identity, self._tracker.where
        self._write_note(identity=identity, where=where, steps=steps, num_incidents=num_incidents)
        self._fold = RowFold(Position(num_events, steps), self._tracker.can_rewind, self._history)
        early, self._early = self._early, []
        for event in early:
            self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        assert self._fold is not None
        assert self._tracker is not None
        for item in self._fold.take(event):
            if isinstance(item, Rewind):
                self._send()
                self._report(busy=True)
                self._tracker.rewind(item.step)
                steps = {kind: min(step, item.step) for kind, step in self._note.steps.items()}
                self._write_note(steps=steps, num_incidents=0)
            else:
                self._batch.append(item)
        if len(self._batch) >= BATCH_ROWS:
            self._send()

    def _send(self) -> None:
        """Send the rows and incidents that wait, and note it."""
        if self._fold is None or self._tracker is None:
            return
        incidents = self._fold.incidents
        num_incidents = max(len(incidents), self._note.num_incidents)  # those that were sent before come first
        if not self._batch and num_incidents == self._note.num_incidents:
            return
        self._report(busy=True)
        if self._batch:
            self._tracker.send(self._batch)
        if num_incidents > self._note.num_incidents:
            self._tracker.report(incidents, self._note.num_incidents)
        steps = dict(self._note.steps) | _newest(self._batch)
        self._batch = []
        num_events = max(self._fold.num_events, self._note.num_events)
        self._write_note(num_events=num_events, steps=steps, num_incidents=num_incidents, status="")
        self._report(step=steps.get("train", 0), last_step=self._history.last_step)

    def _write_note(self, **changes: Any) -> None:
        self._note = dataclasses.replace(self._note, **changes)
        self._note.write(self._run_dir, self._name)


def _newest(rows: Sequence[Row]) -> dict[str, int]:
    return {kind: row.step for row in rows for kind in row.values}


def _is_there(where: str) -> bool:
    """Return whether what a tracker has written is still there; of a server that is not asked."""
    path = where.removeprefix("sqlite:///")
    return "://" in path or Path(path).exists()


def hyperparameters(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """Return the Task's name, and its fields and the options of the run, from spec.json."""
    try:
        description = json.loads((run_dir / "spec.json").read_bytes())
        task, fields, spec = description["task"]["name"], description["task"]["fields"], description["spec"]
    except (OSError, ValueError, KeyError, TypeError):  # a loop of one's own that has ended before its first step
        return run_dir.absolute().name, {}
    options = {f"options/{name}": value for name, value in spec.items() if value is not None}
    return str(task), {"task": task, **fields, **options}


def outcome_of(run_dir: Path, last_end: Mapping[str, Any] | None) -> Outcome:
    """Return how a run has ended: by its result, or its newest `end` event; without either it is unfinished."""
    try:
        result = json.loads((run_dir / "result.json").read_bytes())
        return Outcome(status="complete", summary=result)
    except (OSError, ValueError):
        pass
    if last_end is None:
        return Outcome(status="unfinished")
    error = {"error": last_end["error"]} if last_end.get("error") else {}
    return Outcome(status=str(last_end["status"]), summary={"steps": last_end.get("step"), **error})
