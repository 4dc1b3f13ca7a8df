"""From events to rows: which numbers of a log are sent, and each only once. Pure: values in, values out."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from instep.monitor.incidents import Incident, IncidentFold
from instep.monitor.tracking.tracker import KINDS, NONE, Row

_KIND_OF = {"step": "train", "epoch": "epoch", "eval": "eval"}


@dataclass(frozen=True)
class Rewind:
    """Everything after a step was made again."""

    step: int


class History:
    """What of a log was made again later: the cuts, each where a step comes that was there before."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.num_events, self.last_step = 0, 0
        cuts: list[tuple[int, int]] = []
        for index, event in enumerate(events):
            self.num_events = index + 1
            if event.get("event") == "step":
                if event["step"] <= self.last_step:
                    cuts.append((index, event["step"]))
                self.last_step = event["step"]
        self._indices = [index for index, _ in cuts]
        self._least = [step for _, step in cuts]  # then: the smallest step of this cut and all later ones
        for place in range(len(cuts) - 2, -1, -1):
            self._least[place] = min(self._least[place], self._least[place + 1])

    def is_superseded(self, index: int, step: int) -> bool:
        """Return whether a later attempt made this step again."""
        place = bisect_right(self._indices, index)
        return place < len(self._least) and step >= self._least[place]


@dataclass(frozen=True)
class Position:
    """How far a tracker is: the events that were taken in, and the newest step sent by kind."""

    num_events: int = 0
    steps: Mapping[str, int] | None = None


class RowFold:
    """Takes all events of a log, from its first one on, and returns what is new to a tracker.

    A row is complete when the next step begins: its epoch's means and its evaluation come after it.
    """

    def __init__(self, position: Position, can_rewind: bool, history: History) -> None:
        self._sent = {kind: (position.steps or {}).get(kind, NONE) for kind in KINDS}
        self._num_old, self._can_rewind, self._history = position.num_events, can_rewind, history
        self._pending: Row | None = None
        self._incidents = IncidentFold()
        self.num_events = 0
        self.incidents: list[Incident] = []
        """All of the run so far."""
        self.last_end: Mapping[str, Any] | None = None
        """The newest `end` event, unless a process has started since."""

    def take(self, event: Mapping[str, Any]) -> Iterator[Row | Rewind]:
        """Take an event in; yield what is to be sent now."""
        index, kind = self.num_events, event.get("event")
        self.num_events += 1
        if (incident := self._incidents.take(event)) is not None:
            self.incidents.append(incident)
        if kind in ("start", "end"):
            self.last_end = event if kind == "end" else None
        if kind not in _KIND_OF or self._history.is_superseded(index, event["step"]):
            return
        step, of_kind = event["step"], _KIND_OF[kind]
        if kind == "step":
            if self._pending is not None and step <= self._pending.step:
                self._pending = None
            if step <= self._sent["train"] and self._can_rewind and index >= self._num_old:
                self._sent = {name: min(sent, step - 1) for name, sent in self._sent.items()}
                yield Rewind(step - 1)
        if step <= self._sent[of_kind]:
            return
        if self._pending is not None and self._pending.step != step:
            yield from self.flush()
        self._pending = _merged(self._pending, event, of_kind)

    def flush(self) -> Iterator[Row]:
        """Yield the row that waits for its evaluation, if there is one."""
        row, self._pending = self._pending, None
        if row is not None:
            self._sent.update(dict.fromkeys(row.values, row.step))
            yield row


def _merged(row: Row | None, event: Mapping[str, Any], kind: str) -> Row:
    """Return the row of an event's step, with the event's values."""
    values = _values(event, kind)
    if row is None:
        return Row(step=event["step"], time_s=event["time"], epoch=event.get("epoch"), values={kind: values})
    merged = {**row.values, kind: {**row.values.get(kind, {}), **values}}
    return Row(step=row.step, time_s=row.time_s, epoch=row.epoch, values=merged)


def _values(event: Mapping[str, Any], kind: str) -> dict[str, float]:
    if kind == "eval":
        return dict(event["metrics"])
    norm = event.get("grad_norm")
    more = {} if kind == "epoch" else {"lr": event["lr"]} | ({} if norm is None else {"grad_norm": norm})
    return {"loss": event["loss"], **more, **event.get("scalars", {})}
