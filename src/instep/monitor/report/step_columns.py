"""The steps of a log as columns: a million of them in a second or two, which one object each would not be.

`EventLog` writes nearly all steps in one form. Lines in that form are read by a pattern, all of a block at once; a
block with any other line of a step is parsed line by line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instep.monitor.run_log import DamagedLine, fault_of

Floats = NDArray[np.float64]
_BLOCK_BYTES = 2**22
_PREFIX = b'{"event": "step",'
_NUMBER = rb"([-+.0-9e]+)"
_LINE = re.compile(
    rb'^\{"event": "step", "time": ' + _NUMBER + rb', "step": (\d+), "epoch": (\d+), "loss": ' + _NUMBER + rb', "lr": '
    + _NUMBER + rb', "num_samples": (\d+)(?:, "num_tokens": (\d+))?(?:, "grad_norm": ' + _NUMBER
    + rb')?(?:, "scalars": (\{[^{}]*\}))?\}$',
    re.M,
)  # fmt: skip
_COLUMNS = ("time", "step", "epoch", "loss", "lr", "num_samples", "num_tokens", "grad_norm")


@dataclass(frozen=True)
class StepColumns:
    """The steps of rank 0, each once, in order."""

    time: Floats
    step: Floats
    epoch: Floats
    loss: Floats
    lr: Floats
    num_samples: Floats
    num_tokens: Floats
    """NaN: they were not counted."""
    grad_norm: Floats
    """NaN: it was not logged."""
    scalars: Mapping[int, Mapping[str, Any]]
    """By index."""
    num_skipped: int

    def __len__(self) -> int:
        return len(self.step)


def read_steps(path: Path, damaged: list[DamagedLine]) -> StepColumns:
    """Read the steps of a log; lines that begin as a step and are none are added to `damaged`.

    Of a step that a restart made again, the first one counts, as `RunLog` has it.
    """
    reader = _Reader(path, damaged)
    try:
        with path.open("rb") as file:
            rest = b""
            while block := file.read(_BLOCK_BYTES):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                reader.take(whole + newline)
    except OSError:  # RunLog, which reads the same file, names it
        pass
    return reader.columns()


class _Reader:
    def __init__(self, path: Path, damaged: list[DamagedLine]) -> None:
        self._path, self._damaged = path, damaged
        self._blocks: list[Floats] = []
        self._scalars: dict[int, Mapping[str, Any]] = {}
        self._num_rows, self._num_lines, self._skipped = 0, 0, set[int]()

    def take(self, block: bytes) -> None:
        """Take whole lines in."""
        rows = _LINE.findall(block)
        if len(rows) == block.count(b"\n" + _PREFIX) + block.startswith(_PREFIX):
            self._add(rows)
        else:
            self._take_lines(block.split(b"\n")[:-1])
        self._num_lines += block.count(b"\n")

    def _add(self, rows: list[tuple[bytes, ...]]) -> None:
        for number, row in enumerate(rows):
            if row[8]:
                self._add_scalars(self._num_rows + number, row[8])
        numbers = map(float, chain.from_iterable((*row[:6], row[6] or b"nan", row[7] or b"nan") for row in rows))
        values = np.fromiter(numbers, np.float64, len(_COLUMNS) * len(rows))  # faster than numpy's own parser
        self._blocks.append(values.reshape(-1, len(_COLUMNS)))
        self._num_rows += len(rows)

    def _add_scalars(self, row: int, text: bytes) -> None:
        self._scalars[row] = json.loads(text)

    def _take_lines(self, lines: list[bytes]) -> None:
        for number, line in enumerate(lines, self._num_lines + 1):
            if not line.startswith(_PREFIX):
                continue
            try:
                event = json.loads(line)
                fault = fault_of(event)
            except (ValueError, RecursionError):
                event, fault = {}, "is no JSON object"
            if fault is None:
                self._add_event(event)
            else:
                self._damaged.append(DamagedLine(self._path, number, fault))

    def _add_event(self, event: Mapping[str, Any]) -> None:
        may_lack = [np.nan if event.get(name) is None else event[name] for name in _COLUMNS[6:]]
        values = [*(event[name] for name in _COLUMNS[:6]), *may_lack]
        self._blocks.append(np.array([values], dtype=np.float64))
        if isinstance(event.get("scalars"), dict) and event["scalars"]:
            self._scalars[self._num_rows] = event["scalars"]
        if event.get("skipped") is True:
            self._skipped.add(self._num_rows)
        self._num_rows += 1

    def columns(self) -> StepColumns:
        """Return the columns, without steps that were made again."""
        table = np.concatenate([*self._blocks, np.empty((0, len(_COLUMNS)))])
        steps = table[:, 1]
        newest = np.concatenate([[-np.inf], np.maximum.accumulate(steps)[:-1]]) if len(steps) else steps
        rows = np.flatnonzero(steps > newest)
        places = {int(row): place for place, row in enumerate(rows)} if self._scalars else {}
        scalars = {places[row]: values for row, values in self._scalars.items() if row in places}
        num_skipped = len(self._skipped.intersection(map(int, rows))) if self._skipped else 0
        columns = {name: table[rows, number] for number, name in enumerate(_COLUMNS)}
        return StepColumns(**columns, scalars=scalars, num_skipped=num_skipped)
