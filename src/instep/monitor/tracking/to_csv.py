"""CSV files in RUN/csv: one table of steps, epochs, evaluations, incidents, hyper-parameters and the result each."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from instep.monitor.incidents import Incident
from instep.monitor.tracking.tracker import KINDS, NONE, Outcome, Row, TrackedRun, Tracker

_FILES = {"train": "steps.csv", "epoch": "epochs.csv", "eval": "evaluations.csv"}
_FIRST = {"train": ("step", "time", "epoch"), "epoch": ("step", "time", "epoch"), "eval": ("step", "time")}
"""The columns that every row has."""


class CsvTracker(Tracker):
    """Writes tables that pandas and spreadsheets read; numbers keep all their digits."""

    can_rewind: ClassVar[bool] = True

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.path / "csv"
        self._folder.mkdir(exist_ok=True)
        self.where, self.identity = str(self._folder), {"folder": "csv"}
        self._tables = {kind: Table(self._folder / _FILES[kind], _FIRST[kind]) for kind in KINDS}
        if not run.identity:
            for table in self._tables.values():
                table.remove()
        values = ({"name": name, "value": _cell(value)} for name, value in run.hyperparameters.items())
        write_table(self._folder / "hyperparameters.csv", ("name", "value"), values)

    def sent(self) -> dict[str, int]:
        """Return the last step of each table."""
        rows = {kind: table.rows() for kind, table in self._tables.items()}
        return {kind: int(of_kind[-1]["step"]) if of_kind else NONE for kind, of_kind in rows.items()}

    def send(self, rows: Sequence[Row]) -> None:
        """Append rows to the tables that they have values for."""
        for kind, table in self._tables.items():
            table.append([_fields(row, kind) for row in rows if kind in row.values])

    def rewind(self, step: int) -> None:
        """Write the tables again, without later steps."""
        for table in self._tables.values():
            table.keep_until(step)

    def report(self, incidents: Sequence[Incident], num_reported: int) -> None:  # noqa: ARG002
        """Write the table of incidents again."""
        rows = ({"time": repr(i.time_s), "step": i.step, "kind": i.kind, "text": i.text} for i in incidents)
        write_table(self._folder / "incidents.csv", ("time", "step", "kind", "text"), rows)

    def finish(self, outcome: Outcome) -> None:
        """Write the result."""
        values = {"status": outcome.status, **outcome.summary}
        rows = ({"name": name, "value": _cell(value)} for name, value in values.items())
        write_table(self._folder / "result.csv", ("name", "value"), rows)


class Table:
    """A file of rows in the order of their steps, to which columns may be added."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._first = path, tuple(columns)
        self._columns = self._first
        if path.exists():
            self._cut_torn_line()
            with path.open(newline="") as file:
                self._columns = tuple(csv.DictReader(file).fieldnames or self._first)

    def rows(self) -> list[dict[str, str]]:
        """Return all rows."""
        if not self._path.exists():
            return []
        with self._path.open(newline="") as file:
            return list(csv.DictReader(file))

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows; where one has a new column, the file is written again with it."""
        if not rows:
            return
        columns = tuple(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        if columns != self._columns or not self._path.exists():
            before, self._columns = self.rows(), columns
            write_table(self._path, columns, before)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="", lineterminator="\n").writerows(rows)

    def keep_until(self, step: int) -> None:
        """Remove the rows of later steps."""
        if self._path.exists():
            write_table(self._path, self._columns, [row for row in self.rows() if int(row["step"]) <= step])

    def remove(self) -> None:
        """Remove the file: it is another run's, or its position is not known."""
        self._path.unlink(missing_ok=True)
        self._columns = self._first

    def _cut_torn_line(self) -> None:
        data = self._path.read_bytes()
        if not data.endswith(b"\n"):  # a kill came while it was written
            os.truncate(self._path, data.rfind(b"\n") + 1)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole table; it is there as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def _fields(row: Row, kind: str) -> dict[str, Any]:
    first = {"step": row.step, "time": repr(row.time_s), "epoch": row.epoch}
    own = {name: first[name] for name in _FIRST[kind]}
    return {**row.values[kind], **own}


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
