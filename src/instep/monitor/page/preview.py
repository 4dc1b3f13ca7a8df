"""A first look at a long log: the whole file's course in milliseconds, before it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from instep.monitor.page.table import Table

LONG_BYTES = 2**22
"""Logs that are shorter are read before they are shown."""
_NUM_LINES = 800
_LINE_BYTES = 2**12


def preview(path: Path) -> Table:
    """Return steps from all over a log, evenly spaced in the file; those that a restart made again are left out."""
    table = Table()
    with path.open("rb", buffering=0) as file:
        num_bytes = path.stat().st_size
        for number in range(_NUM_LINES):
            file.seek(number * num_bytes // _NUM_LINES)
            event = _first_step(file.read(_LINE_BYTES))
            if event is None:
                continue
            if table.last_step is not None and event["step"] <= table.last_step:
                table.rewind(event["step"])
            table.append(event["step"], event["time"], {"loss": event["loss"], "lr": event["lr"]})
    return table


def _first_step(data: bytes) -> dict[str, Any] | None:
    """Return the first whole line that is a step."""
    for line in data.split(b"\n")[1:-1]:
        if b'"step"' in line[:20]:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and {"step", "time", "loss", "lr"} <= event.keys():
                return event
    return None
