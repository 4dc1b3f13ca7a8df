"""The log: what is written can be read, also while it is written, also after a kill."""

from __future__ import annotations

import json
import time
from pathlib import Path

from instep.events.read import EventTail, path_of, read_events
from instep.events.schema import RECORDS, NoticeRecord, StepRecord
from instep.events.write import EventLog


def a_step(number: int, **more: object) -> StepRecord:
    return StepRecord(step=number, epoch=0, loss=0.1 * number, lr=1e-3, num_samples=8, **more)


def test_steps_and_others_keep_their_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    log.step(a_step(1))
    log.step(a_step(2))
    log.write(NoticeRecord(text="note"))
    log.step(a_step(3, skipped=True, grad_norm=2.0))
    log.step(a_step(4, metrics={"a": 1.0}))
    log.close()
    events = read_events(tmp_path)
    assert [e.get("step", e.get("text")) for e in events] == [1, 2, "note", 3, 4]
    assert events[0]["loss"] == 0.1
    assert events[3]["skipped"]
    assert events[3]["grad_norm"] == 2.0
    assert events[4]["metrics"] == {"a": 1.0}
    assert all(abs(e["time"] - time.time()) < 60 for e in events)


def test_every_line_is_json_also_with_odd_numbers(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    log.step(StepRecord(step=1, epoch=0, loss=float("inf"), lr=1.0, num_samples=1))
    log.step(StepRecord(step=2, epoch=0, loss=float("nan"), lr=1.0, num_samples=1))
    log.close()
    assert [json.loads(line)["step"] for line in path_of(tmp_path).read_text().splitlines()] == [1, 2]


def test_a_tail_sees_each_line_once_and_waits_for_the_rest_of_one(tmp_path: Path) -> None:
    path = path_of(tmp_path)
    tail = EventTail(path)
    assert list(tail.poll()) == []
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"st')
    assert list(tail.poll()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert list(tail.poll()) == [{"step": 2}]
    assert list(tail.poll()) == []


def test_half_a_line_of_a_killed_process_is_skipped(tmp_path: Path) -> None:
    path = path_of(tmp_path)
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"ste')
    log = EventLog(tmp_path, 0)
    log.write(NoticeRecord(text="again"))
    log.close()
    assert [e.get("step", e.get("text")) for e in read_events(tmp_path)] == [1, "again"]


def test_a_kind_registers_itself() -> None:
    assert RECORDS["step"] is StepRecord
    repeated = {name for name, record in RECORDS.items() if record.once_per_step}
    assert repeated == {"step", "epoch", "eval", "save", "sources"}
    assert all("step" in RECORDS[name].__dataclass_fields__ for name in repeated)
