"""What happened in a run besides its steps, as marks on the time axis, each with its sentence. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from instep.monitor.incidents import STRAGGLER, restart_text
from instep.monitor.progress import duration
from instep.monitor.reading import size_text

KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("hang", re.compile(r"\bhung\b")),
    ("nan", re.compile(r"^(NumericsError: )?the (loss of step \d+ is (nan|-?inf)|gradient of step \d+ is not finite)")),
    ("divergence", re.compile(r"no longer hold the same|ended with other weights")),
    ("straggler", STRAGGLER),
    ("stop", re.compile(r"^(asked to stop|stopped early)")),
)
"""Which mark a sentence of a run becomes, by its words; the first that fits."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at a time: a save, a restart, a NaN."""

    time_s: float
    step: int
    kind: str
    text: str

    def to_json(self, origin_s: float) -> dict[str, Any]:
        """Return the mark for the page; its time counts from `origin_s`."""
        return {**asdict(self), "time_s": round(self.time_s - origin_s, 3)}


class MarkFold:
    """Collects the marks of a run from its events. `marks` only grows.

    `hangs` returns the sentences with which the launcher ended hung attempts; no rank can write an event about that.
    """

    def __init__(self, hangs: Callable[[], Sequence[str]]) -> None:
        self.marks: list[Mark] = []
        self.num_restarts = 0
        self._hangs = hangs
        self._world_size = 0
        self._has_ended = True
        self._failed_s = float("-inf")
        self._reason = ""
        self._newest: tuple[float, int] = (0.0, 0)

    def take(self, rank: int, event: Mapping[str, Any], step: int) -> None:
        """Take an event in that is not a step; `step` is rank 0's newest one."""
        kind, time_s, step = event["event"], event["time"], event.get("step", step)
        if kind == "end":
            self._end(rank, event)
        elif rank != 0:
            return
        elif kind == "restart":
            self._reason = event["reason"]
        elif kind == "start":
            self._start(event, step)
            self._reason = ""
        elif kind == "save":
            waited = f", training waited {duration(event.get('stall_s', 0.0))}" if event.get("stall_s") else ""
            took = f"{size_text(event['num_bytes'])} in {duration(event['seconds'])}{waited}"
            self._add(time_s, step, "save", f"checkpoint of step {step}: {took}")
        elif kind == "save_failed":
            self._add(time_s, step, "save_failed", event["error"])
        elif kind == "notice":
            self._add(time_s, step, kind_of(event["text"], "notice"), event["text"])
        elif kind == "input":
            self._add(time_s, step, "notice", f"data: read {event['reading']} from now on: {event['reason']}")

    def seen(self, time_s: float, step: int) -> None:
        """Note the newest step: it is where an attempt ended that says nothing of its end."""
        self._newest = (time_s, step)

    def _start(self, event: Mapping[str, Any], step: int) -> None:
        count, before = event["world_size"], self._world_size
        self._world_size = count
        if not before:
            self._has_ended = False
            return
        self.num_restarts += 1
        if not self._has_ended:
            self._add(*self._newest, *self._lost())
        self._has_ended = False
        self._add(event["time"], step, "restart", restart_text(event, self._reason))
        if count != before:
            change = ("join", f"{count - before} joined") if count > before else ("leave", f"{before - count} left")
            self._add(event["time"], step, change[0], f"world size {before} → {count}: {change[1]}")

    def _lost(self) -> tuple[str, str]:
        """Return the kind and the sentence of an attempt that ended without a last event."""
        step = self._newest[1]
        for sentence in self._hangs():
            if any(int(number) in (step, step + 1) for number in _STEP.findall(sentence)):
                return "hang", sentence
        cause = self._reason or "it was killed, or hung, or its node was lost"
        return "lost", f"rank 0 ended without a last event: {cause}"

    def _end(self, rank: int, event: Mapping[str, Any]) -> None:
        if rank == 0:
            self._has_ended = True
        if event["status"] != "failed":
            if rank == 0:
                self._add(event["time"], event["step"], "end", f"{event['status']} after step {event['step']}")
            return
        text = event.get("error") or "the rank failed"
        # Ranks that lost a peer fail seconds later. Logs are read rank by rank: an earlier failure may come after them
        if text.startswith("PeerLost") or 0 <= event["time"] - self._failed_s < _SAME_FAILURE_S:
            return
        self._failed_s = event["time"]
        self._add(event["time"], event["step"], kind_of(text, "failure"), f"rank {rank}: {text}")

    def _add(self, time_s: float, step: int, kind: str, text: str) -> None:
        self.marks.append(Mark(time_s, step, kind, text))


_SAME_FAILURE_S = 5.0
_STEP = re.compile(r"\bstep (\d+)")


def kind_of(text: str, otherwise: str) -> str:
    """Return the kind of mark that a sentence becomes."""
    return next((kind for kind, pattern in KINDS if pattern.search(text)), otherwise)
