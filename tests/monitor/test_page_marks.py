"""What happened in a run becomes marks with their sentences; and what the ranks printed becomes plain text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.events.read import path_of
from instep.events.schema import EndRecord, NoticeRecord, RestartRecord
from instep.guard.straggler import StepTime, StragglerDetector
from instep.monitor.page.logs import plain_text
from instep.monitor.page.marks import kind_of
from instep.monitor.page.text import picture, sparkline
from instep.monitor.page.view import RunView
from instep.monitor.report.collect import collect
from watched import Writer, write_eventful_run

HANG = (
    "hung: rank 1 is in files.py:41 __getitem__ (blocked 9 s in read()); rank 0 waits for it in all_reduce of step 31"
)
REASON = "restart 1 of 3 after rank 1: killed (SIGKILL): out of memory, or someone killed it"


def marks_of(run_dir: Path) -> list[dict[str, Any]]:
    view = RunView(run_dir)
    view.advance(60)
    message = view.message(None)
    assert message is not None
    return message["marks"]


def restarted(run_dir: Path, world_size: int = 2) -> None:
    log = Writer(run_dir, world_size=2)
    log.start()
    log.steps(1, 30)
    log.world_size = world_size
    log.start(attempt=1, first_step=20)
    log.steps(21, 40)


def test_a_hang_has_the_launcher_s_sentence(tmp_path: Path) -> None:
    restarted(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text(f"reading\n{HANG}\nwhere rank 1 hung:\n  File x\n")
    assert [(mark["kind"], mark["step"]) for mark in marks_of(tmp_path)] == [("hang", 30), ("restart", 30)]
    assert marks_of(tmp_path)[0]["text"] == HANG


def test_a_restart_has_the_reason_that_the_launcher_wrote(tmp_path: Path) -> None:
    log = Writer(tmp_path, world_size=2)
    log.start()
    log.steps(1, 30)
    log.write(RestartRecord(reason=REASON))
    log.start(attempt=1, first_step=20)
    log.steps(21, 40)
    log.start(attempt=2, first_step=20)  # by an older launcher, say: that reason is not this one's
    texts = [(mark["kind"], mark["text"]) for mark in marks_of(tmp_path)]
    assert texts == [
        ("lost", f"rank 0 ended without a last event: {REASON}"),
        ("restart", f"{REASON}, on 2 processes"),
        ("lost", "rank 0 ended without a last event: it was killed, or hung, or its node was lost"),
        ("restart", "restart 2, on 2 processes"),
    ]
    incidents = [incident.text for incident in collect(tmp_path).incidents]
    assert incidents == [f"{REASON}, on 2 processes", "restart 2, on 2 processes"]


def test_the_sentence_of_another_hang_is_not_taken(tmp_path: Path) -> None:
    restarted(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text(HANG.replace("step 31", "step 7") + "\n")
    assert [mark["kind"] for mark in marks_of(tmp_path)] == ["lost", "restart"]


@pytest.mark.parametrize(
    ("world_size", "kind", "text"), [(3, "join", "2 → 3: 1 joined"), (1, "leave", "2 → 1: 1 left")]
)
def test_another_world_size(tmp_path: Path, world_size: int, kind: str, text: str) -> None:
    restarted(tmp_path, world_size)
    (mark,) = [mark for mark in marks_of(tmp_path) if mark["kind"] == kind]
    assert mark["text"] == f"world size {text}"


def test_the_first_failure_is_the_cause(tmp_path: Path) -> None:
    log = Writer(tmp_path, world_size=3)
    log.start()
    log.steps(1, 3)
    log.write(EndRecord(status="failed", step=3, error="ValueError: bad\nsample"), rank=2)
    log.now_s += 1
    log.write(EndRecord(status="failed", step=3, error="PeerLost: rank 2 has left"), rank=1)
    log.write(EndRecord(status="failed", step=3, error="RuntimeError: connection closed"), rank=0)
    failures = [mark for mark in marks_of(tmp_path) if mark["kind"] == "failure"]
    first = min(failures, key=lambda mark: mark["time_s"])
    assert first["text"] == "rank 2: ValueError: bad\nsample"
    assert not any("PeerLost" in mark["text"] for mark in failures)


def test_sentences_of_the_training_are_known() -> None:
    """Their words are the training's own: whoever changes them there learns of it here."""
    from instep.train.origin import describe_refusal

    assert kind_of(describe_refusal(7, float("nan"), [1, 2]), "notice") == "nan"
    assert kind_of(describe_refusal(7, 1.0, [1, 2]), "notice") == "nan"
    assert kind_of("DivergenceError: the ranks no longer hold the same: between step 3 …", "failure") == "divergence"
    assert kind_of("asked to stop: saving at step 3 in x, from where the run continues.", "notice") == "stop"
    assert kind_of("something else", "notice") == "notice"
    stragglers = StragglerDetector(3)
    sentences: list[str] = []
    for _ in range(50):
        sentences += stragglers.check([StepTime(0.0, 1.0, 10.0), StepTime(0.0, 9.0, 10.0), StepTime(0.0, 1.0, 10.0)])
    assert sentences
    assert {kind_of(sentence, "notice") for sentence in sentences} == {"straggler"}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x1b[1;31mred\x1b[0m\n", "red\n"),
        (b"10%\r20%\r100%\nnext\r\n", "100%\nnext\n"),
        (b"\x1b]0;title\x07bell\x00\x08\n", "bell\n"),
        (b"\xff\xfe\n", "\ufffd\ufffd\n"),
    ],
)
def test_logs_are_what_a_terminal_shows_in_the_end(data: bytes, text: str) -> None:
    assert plain_text(data) == text


def test_the_same_in_a_terminal(tmp_path: Path) -> None:
    from rich.console import Console

    write_eventful_run(tmp_path, num_steps=800)
    view = RunView(tmp_path)
    view.advance(60)
    console = Console(width=120, record=True, file=(tmp_path / "shown").open("w"))
    console.print(picture("eventful", view, 120))
    console.file.close()
    shown = console.export_text()
    for words in (
        "eventful  complete",
        "step 800/800",
        "Input bounded the speed: rank 2",
        "communication",
        "restart 1",
    ):
        assert words in shown
    assert f"loss {view.facts()['values']['loss']:.4g}" in shown
    log = Writer(tmp_path, world_size=1)
    log.write(NoticeRecord(text="[red]no markup[/red]"))
    view.advance(60)
    assert "[red]no markup[/red]" in str(_text_of(picture("eventful", view, 120)))


def _text_of(renderable: Any) -> str:
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_log_holds_the_good_part_is_shown(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Fields of any type, in any event: nothing is raised, and the steps after it are there."""
    run_dir = tmp_path_factory.mktemp("run")
    log = Writer(run_dir, world_size=1)
    log.start()
    log.steps(1, 2)
    log.phases(2, 2, 0.2)
    lines = path_of(run_dir).read_text().splitlines()
    for _ in range(5):
        event = json.loads(data.draw(st.sampled_from(lines)))
        name = data.draw(st.sampled_from([*event, "scalars", "metrics", "grad_norm", "stall_s", "error"]))
        event[name] = data.draw(JSON)
        log.raw(json.dumps(event) + "\n")
    log.start(attempt=1)
    log.steps(1, 4, loss=0.5)
    view = RunView(run_dir)
    view.advance(60)
    message = view.message(None)
    assert message is not None
    assert message["tables"]["train"]["last"]["loss"] == 0.5
    json.dumps([message, view.facts(), view.window(0, 10)])


def test_a_spike_is_seen_in_a_line_of_blocks() -> None:
    assert sparkline([1.0] * 500 + [9.0] + [1.0] * 499, 20).count("█") == 1
    assert sparkline([1.0, 1.0], 20) == "▁▁"
