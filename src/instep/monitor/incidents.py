"""What a person should know about a run: restarts, notices, failures. Pure: events in, incidents out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from instep.core.plural import plural

_FAILED = ("failed",)
STRAGGLER = re.compile(r"^rank \d+ takes .* ms a step for ")
"""How the sentences of guard/straggler.py begin."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A restart, a notice or a failure."""

    time_s: float
    step: int
    kind: str
    text: str


class IncidentFold:
    """Takes the events of one rank, from the first one on, and returns those that are incidents."""

    def __init__(self) -> None:
        self._num_starts, self._step = 0, 0
        self._reason = ""

    def take(self, event: Mapping[str, Any]) -> Incident | None:
        """Take an event in; return the incident that it is, if it is one."""
        kind, text = event.get("event"), ""
        if kind == "step":
            self._step = event["step"]
            return None
        if kind == "start":
            self._num_starts += 1
            text = restart_text(event, self._reason) if self._num_starts > 1 else ""
            self._reason = ""
        elif kind == "restart":
            self._reason = event["reason"]
        elif kind == "notice":
            text = event["text"]
        elif kind == "save_failed":
            text = event["error"]
        elif kind == "end" and event["status"] in _FAILED:
            text = str(event.get("error") or "the run has failed")
        if not text:
            return None
        step = event.get("step")
        step = step if isinstance(step, int) else self._step
        return Incident(time_s=event["time"], step=step, kind=_kind_of(str(kind), text), text=text)


def restart_text(start: Mapping[str, Any], reason: str) -> str:
    """Return what a `start` event that is not the first one says; `reason`: that of a `restart` event before it."""
    again = f"restart {start['attempt']}" if start["attempt"] else "continued by a new command"
    return f"{reason or again}, on {plural(start['world_size'], 'process', 'processes')}"


def _kind_of(event: str, text: str) -> str:
    if event == "notice" and STRAGGLER.search(text):
        return "straggler"
    return {"start": "restart", "end": "failure"}.get(event, event)
