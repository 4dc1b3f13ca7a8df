"""Which numbers of a log are sent: each step once, none left out, whatever was killed and made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.monitor.tracking.rows import History, Position, Rewind, RowFold
from instep.monitor.tracking.tracker import Row

Event = dict[str, Any]


def attempts_to_events(attempts: list[tuple[int, int]]) -> list[Event]:
    """Return the events of attempts: (steps to go back, steps to make) each; an epoch has four steps."""
    events: list[Event] = []
    newest = 0
    for number, (back, count) in enumerate(attempts):
        first = max(0, newest - back)
        events.append({"event": "start", "time": 0.0, "world_size": 1, "attempt": number})
        for step in range(first + 1, first + count + 1):
            loss = step + number / 100
            events.append({"event": "step", "time": 1.0, "step": step, "epoch": 0, "loss": loss, "lr": 0.1})
            if step % 4 == 0:
                events.append({"event": "epoch", "time": 1.0, "step": step, "epoch": 0, "loss": loss, "scalars": {}})
                events.append({"event": "eval", "time": 1.0, "step": step, "metrics": {"accuracy": loss}})
        newest = first + count
    return events


def last_values(events: list[Event]) -> dict[tuple[str, int], float]:
    values: dict[tuple[str, int], float] = {}
    newest = 0
    for event in events:
        if event["event"] == "step":
            if event["step"] <= newest:
                values = {key: value for key, value in values.items() if key[1] < event["step"]}
            newest = event["step"]
        if event["event"] != "start":
            name = {"step": "train/loss", "epoch": "epoch/loss", "eval": "eval/accuracy"}[event["event"]]
            values[name, event["step"]] = event["loss"] if "loss" in event else event["metrics"]["accuracy"]
    return values


class Backend:
    """A store that appends, and takes back if it can; refuses a number that it has."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], float] = {}

    def receive(self, items: list[Row | Rewind]) -> None:
        for item in items:
            if isinstance(item, Rewind):
                self.numbers = {key: value for key, value in self.numbers.items() if key[1] <= item.step}
                continue
            for name, value in item.flat().items():
                if name != "train/lr":
                    assert (name, item.step) not in self.numbers, "sent twice"
                    self.numbers[name, item.step] = value

    def position(self, num_events: int) -> Position:
        kinds = ("train", "epoch", "eval")
        return Position(num_events, {k: max((s for n, s in self.numbers if n.startswith(k)), default=0) for k in kinds})


def send(backend: Backend, events: list[Event], known: int, noted: int, can_rewind: bool, stop: int) -> int:
    """Send events up to `stop`, of which the first `known` are there when it opens; return how many were taken in."""
    fold = RowFold(backend.position(noted), can_rewind, History(events[:known]))
    for event in events[:stop]:
        backend.receive(list(fold.take(event)))
    backend.receive(list(fold.flush()))
    return fold.num_events


BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # others may be using the machine
ATTEMPTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 15)), min_size=1, max_size=6)


@BUSY
@given(attempts=ATTEMPTS, cut=st.integers(0, 200), lag=st.integers(0, 30), can_rewind=st.booleans())
def test_each_step_once_and_none_lost(attempts: list[tuple[int, int]], cut: int, lag: int, can_rewind: bool) -> None:
    """A process sees a part of the log, is killed before it has noted all of that, and a second one follows."""
    events = attempts_to_events(attempts)
    cut = min(cut, len(events))
    backend = Backend()
    noted = max(0, send(backend, events, 0, 0, can_rewind, stop=cut) - lag)
    send(backend, events, len(events), noted, can_rewind, stop=len(events))
    wanted = last_values(events)
    if can_rewind:
        assert backend.numbers == wanted
    else:
        assert {*wanted} <= {*backend.numbers}  # a store that only appends keeps what an abandoned attempt made
        newest = max((step for _, step in wanted), default=0)
        assert all(int(value) == step for (_, step), value in backend.numbers.items())
        assert {step for _, step in backend.numbers if step > newest} <= {
            event["step"] for event in events[:cut] if event["event"] == "step"
        }


@BUSY
@given(attempts=ATTEMPTS, can_rewind=st.booleans())
def test_a_run_that_is_sent_afterwards_has_its_last_values(attempts: list[tuple[int, int]], can_rewind: bool) -> None:
    events = attempts_to_events(attempts)
    backend = Backend()
    send(backend, events, len(events), 0, can_rewind, stop=len(events))
    assert backend.numbers == last_values(events)


def test_two_evaluations_after_one_step_are_one_row() -> None:
    events = attempts_to_events([(0, 1)])
    events += [{"event": "eval", "time": 2.0, "step": 1, "metrics": {name: 1.0}} for name in ("val/f1", "test/f1")]
    fold = RowFold(Position(), False, History(events))
    assert [item for event in events for item in fold.take(event)] == []
    (row,) = fold.flush()
    assert row.flat() == {"train/loss": 1.0, "train/lr": 0.1, "eval/val/f1": 1.0, "eval/test/f1": 1.0}


def test_incidents(tmp_path: Path) -> None:
    events: list[Event] = [
        {"event": "start", "time": 0.0, "world_size": 2, "attempt": 0},
        {"event": "notice", "time": 1.0, "text": "one sample was left out"},
        {"event": "save_failed", "time": 2.0, "step": 3, "error": "no space", "retry_s": 1.0},
        {"event": "end", "time": 3.0, "status": "failed", "step": 4, "error": "ValueError: x"},
        {"event": "start", "time": 4.0, "world_size": 1, "attempt": 1},
        {"event": "start", "time": 5.0, "world_size": 3, "attempt": 0},
        {"event": "end", "time": 6.0, "status": "complete", "step": 9, "error": ""},
    ]
    fold = RowFold(Position(), False, History(events))
    assert [item for event in events for item in fold.take(event)] == []
    assert [(incident.kind, incident.text) for incident in fold.incidents] == [
        ("notice", "one sample was left out"),
        ("save_failed", "no space"),
        ("failure", "ValueError: x"),
        ("restart", "restart 1, on 1 process"),
        ("restart", "continued by a new command, on 3 processes"),
    ]
