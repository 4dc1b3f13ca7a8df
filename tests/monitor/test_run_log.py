"""The logs of a run's ranks: each event once, as they grow; damaged lines are named, and the rest is read."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.core.errors import SpecError
from instep.events.read import path_of
from instep.events.schema import EvalRecord, PhasesRecord, Record, SaveRecord, StepRecord, to_line
from instep.events.write import EventLog
from instep.monitor.run_log import RunLog


def a_step(step: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(step=step, epoch=0, loss=loss, lr=1e-3, num_samples=8)


def some_phases(step: int) -> PhasesRecord:
    return PhasesRecord(step=step, num_steps=4, num_samples=8, seconds=1.0, phases={"data": 1.0})


def write(run_dir: Path, rank: int, *records: Record) -> None:
    log = EventLog(run_dir, rank)
    for record in records:
        if isinstance(record, StepRecord):
            log.step(record)
        else:
            log.write(record)
    log.close()


def brief(log: RunLog) -> list[tuple[int, str, Any]]:
    return [(rank, event["event"], event.get("step")) for rank, event in log.poll()]


def test_what_is_new_comes_once_from_ranks_that_join_later_too(tmp_path: Path) -> None:
    write(tmp_path, 0, a_step(1), a_step(2))
    log = RunLog(tmp_path)
    assert brief(log) == [(0, "step", 1), (0, "step", 2)]
    assert brief(log) == []
    write(tmp_path, 0, a_step(3))
    write(tmp_path, 10, some_phases(4))
    write(tmp_path, 2, some_phases(4))
    assert brief(log) == [(0, "step", 3), (2, "phases", 4), (10, "phases", 4)]
    assert log.ranks == (0, 2, 10)
    assert brief(log) == []


def test_a_line_that_is_being_written_comes_when_it_is_complete(tmp_path: Path) -> None:
    write(tmp_path, 0, a_step(1))
    line = json.dumps(to_line(a_step(2), time.time()))
    log = RunLog(tmp_path)
    with path_of(tmp_path).open("a") as file:
        file.write(line[:30])
        file.flush()
        assert brief(log) == [(0, "step", 1)]
        file.write(line[30:] + "\n")
    assert brief(log) == [(0, "step", 2)]
    assert log.damaged == []


def test_a_step_that_a_restart_makes_again_comes_once_and_the_time_it_took_both_times(tmp_path: Path) -> None:
    save, scores = SaveRecord(step=2, path="c", num_bytes=1, seconds=0.1), EvalRecord(step=2, metrics={}, seconds=0.1)
    write(tmp_path, 0, a_step(1), a_step(2, 0.25), save, scores, some_phases(2))
    log = RunLog(tmp_path)
    first = [event for _, event in log.poll()]
    write(tmp_path, 0, a_step(2, 0.75), save, scores, some_phases(2), a_step(3))
    second = [event for _, event in log.poll()]
    assert [event["event"] for event in first] == ["step", "step", "save", "eval", "phases"]
    assert [(event["event"], event["step"]) for event in second] == [("phases", 2), ("step", 3)]
    assert len(list(RunLog(tmp_path, repeats=True).poll())) == 10


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"event": "step", "ti', "no JSON object"),
        (b"\x00\x00\xff\xfe", "no JSON object"),
        (b"[1, 2]", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b'{"step": 1}', "names no event"),
        (b'{"event": "step", "step": 1}', "a step event without a time"),
        (b'{"event": "eval", "time": 1.0, "step": 1, "seconds": 1.0}', "an eval event without metrics"),
        (b'{"event": "eval", "time": 1.0, "step": 1, "seconds": 1.0, "metrics": {"a": "b"}}', "metrics is {'a': 'b'}"),
        (b'{"event": "step", "time": 1.0, "step": null}', "step is None"),
    ],
)
def test_damaged_lines_are_named_and_the_others_are_read(tmp_path: Path, line: bytes, reason: str) -> None:
    write(tmp_path, 0, a_step(1), a_step(2))
    write(tmp_path, 1, some_phases(4))
    with path_of(tmp_path).open("ab") as file:
        file.write(b"\n" + line + b"\n")  # an empty line is no damage
    write(tmp_path, 0, a_step(3))
    log = RunLog(tmp_path)
    assert brief(log) == [(0, "step", 1), (0, "step", 2), (0, "step", 3), (1, "phases", 4)]
    (damage,) = log.damaged
    assert (damage.path, damage.line) == (path_of(tmp_path), 4)
    assert reason in damage.reason
    assert f"{path_of(tmp_path)}: line 4 left out" in str(log.damage_text())
    assert brief(log) == []
    assert len(log.damaged) == 1


def test_many_damaged_lines_are_counted(tmp_path: Path) -> None:
    write(tmp_path, 0, a_step(1))
    with path_of(tmp_path).open("a") as file:
        file.write("x\n" * 20)
    log = RunLog(tmp_path)
    assert log.damage_text() is None
    assert brief(log) == [(0, "step", 1)]
    assert "lines 2, 3, 4, 5, 6 and 15 more left out" in str(log.damage_text())


def test_events_of_a_later_version_are_passed_on(tmp_path: Path) -> None:
    write(tmp_path, 0, a_step(1))
    with path_of(tmp_path).open("a") as file:
        file.write('{"event": "teleport", "time": 1.0, "to": 3}\n')
    log = RunLog(tmp_path)
    assert brief(log) == [(0, "step", 1), (0, "teleport", None)]
    assert log.damaged == []


def test_kinds_that_nobody_asks_for_are_skipped_and_lines_still_counted(tmp_path: Path) -> None:
    write(tmp_path, 0, a_step(1), some_phases(1), a_step(2))
    with path_of(tmp_path).open("a") as file:
        file.write("x\n")
    log = RunLog(tmp_path, without=("step",))
    assert brief(log) == [(0, "phases", 1)]
    assert [damage.line for damage in log.damaged] == [4]


def test_a_run_that_starts_over_is_read_from_its_beginning(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, 0, a_step(1), a_step(2))
    log = RunLog(run)
    assert len(brief(log)) == 2
    shutil.move(run, tmp_path / "old")  # as --fresh does
    write(run, 0, a_step(1), a_step(2), a_step(3))
    assert brief(log) == [(0, "step", 1), (0, "step", 2), (0, "step", 3)]
    assert (log.generation, log.ranks) == (1, (0,))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        RunLog(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="is a file"):
        RunLog(tmp_path / "file")
    with pytest.raises(SpecError, match="is not a run: it has neither"):
        RunLog(tmp_path)
    write(tmp_path / "a", 0, a_step(1))
    write(tmp_path / "b", 0, a_step(1))
    with pytest.raises(SpecError, match=r"contains 2 runs: (a, b|b, a)\. Give one"):
        RunLog(tmp_path)


def test_a_run_without_events_yet_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    log = RunLog(tmp_path)
    assert brief(log) == []
    write(tmp_path, 0, a_step(1))
    assert brief(log) == [(0, "step", 1)]


@given(st.lists(st.integers(1, 4), max_size=6), st.data())
def test_each_step_once_however_often_it_was_made_and_read(tmp_path_factory: Any, made: list[int], data: Any) -> None:
    run = tmp_path_factory.mktemp("run")
    write(run, 0)
    log, last, seen = RunLog(run), 0, []
    for num_steps in made:
        first = data.draw(st.integers(0, last)) + 1  # an attempt begins at a checkpoint, somewhere before
        write(run, 0, *(a_step(step) for step in range(first, first + num_steps)))
        last = max(last, first + num_steps - 1)
        if data.draw(st.booleans()):
            seen += [step for _, _, step in brief(log)]
    assert seen + [step for _, _, step in brief(log)] == list(range(1, last + 1))
