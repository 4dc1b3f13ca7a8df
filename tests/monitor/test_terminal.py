"""What a person sees while a run goes on."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from planted_log import steady
from rich.console import Console

from instep.events.schema import EndRecord, EpochRecord, EvalRecord, NoticeRecord, PlanRecord, StartRecord, StepRecord
from instep.events.write import EventLog
from instep.monitor import follow, terminal
from instep.monitor.follow import Follower
from instep.monitor.progress import ProgressState, duration, fit, wrapped
from instep.monitor.reader import EventReader


def write_run(run_dir: Path) -> None:
    log = EventLog(run_dir, 0)
    versions = {"torch": "2.13"}
    log.write(
        StartRecord(
            rank=0,
            world_size=2,
            pid=1,
            host="h",
            attempt=0,
            device="cpu",
            backend="gloo",
            launcher="torchrun",
            versions=versions,
        )
    )
    log.write(
        PlanRecord(
            task="Digits",
            strategy="ddp",
            first_step=0,
            num_steps=10,
            num_epochs=2,
            steps_per_epoch=5,
            batch_size=8,
            num_samples=40,
            num_parameters=1234,
            reading="indexed by the batch",
        )
    )
    for step in range(1, 5):
        log.step(StepRecord(step=step, epoch=0, loss=1 / step, lr=0.1, num_samples=8))
    log.write(EpochRecord(epoch=0, step=4, loss=0.5208333, num_samples=32, scalars={"kl": 0.25}))
    log.write(EvalRecord(step=4, metrics={"accuracy": 0.975}, seconds=0.1))
    log.write(NoticeRecord(text="something [odd]"))
    log.write(EpochRecord(epoch=1, step=8, loss=0.125, num_samples=32))
    log.write(EndRecord(status="complete", step=8))
    log.close()


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, capsys: Any) -> None:
    with Follower(tmp_path, ["terminal"]) as follower:
        assert follower.stream(stream := io.StringIO()) is stream
        write_run(tmp_path)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2 processes on cpu over gloo" in shown.err
    assert "Digits: 1,234 parameters, 40 samples (indexed by the batch), 10 steps of 8" in shown.err
    assert "epoch 1/2  step 4  mean loss 0.5208  kl 0.25  accuracy 0.975\n" in shown.err
    assert "epoch 2/2  mean loss 0.125\n" in shown.err
    assert "note: something [odd]" in shown.err


def test_quiet_shows_nothing(tmp_path: Path, capsys: Any) -> None:
    with Follower(tmp_path, []):
        write_run(tmp_path)
    assert capsys.readouterr().err == ""


def test_history_is_not_shown_again(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path)
    with Follower(tmp_path, ["terminal"]):
        pass
    assert capsys.readouterr().err == ""


class Collecting(EventReader):
    """A tracker: keeps the kind and step of what it receives."""

    def __init__(self, _run_dir: Path) -> None:
        self.received: list[tuple[str, int | None]] = []
        readers.append(self)

    def read(self, event: dict[str, Any]) -> None:
        self.received.append((event["event"], event.get("step")))


class Failing(Collecting):
    """A reader that works for the first event only."""

    def read(self, event: dict[str, Any]) -> None:
        super().read(event)
        raise OSError("no network")


readers: list[Collecting] = []


def test_steps_that_a_restart_repeats_are_not_passed_twice(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(follow.READERS, "collecting", Collecting)
    write_run(tmp_path)
    with Follower(tmp_path, ["collecting"]):
        log = EventLog(tmp_path, 0)
        for step in (3, 4, 5):  # it went on from step 2
            log.step(StepRecord(step=step, epoch=0, loss=1.0, lr=0.1, num_samples=8))
        log.write(EvalRecord(step=4, metrics={}, seconds=0.1))
        log.write(NoticeRecord(text="again"))
        log.close()
    assert readers.pop().received == [("step", 5), ("notice", None)]


def test_a_reader_that_fails_is_dropped(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(follow.READERS, "failing", Failing)
    monkeypatch.setitem(follow.READERS, "unmade", lambda _: 1 / 0)
    monkeypatch.setitem(follow.READERS, "collecting", Collecting)
    with Follower(tmp_path, ["failing", "unmade", "collecting"]):
        write_run(tmp_path)
    collecting, failing = readers.pop(), readers.pop()
    assert failing.received == [("start", None)]
    assert [kind for kind, _ in collecting.received] == [
        *("start", "plan", *["step"] * 4),
        *("epoch", "eval", "notice", "epoch", "end"),
    ]
    shown = capsys.readouterr().err.splitlines()
    assert [line.partition(" has failed")[0] for line in shown] == [
        "instep: the reader 'unmade'",
        "instep: the reader 'failing'",
    ]


SCALARS = {"kl": 0.125, "reconstruction [x]": 0.0512}
WORDS = {
    *(
        "Digits",
        "step",
        "119/30000",
        "epoch",
        "1/5",
        "loss",
        "0.008403",
        "kl",
        "0.125",
        "reconstruction",
        "[x]",
        "0.0512",
    ),
    *(
        "6,400",
        "samples/s",
        "4m59s",
        "left",
        "mean",
        "0.04505",
        "lr",
        "0.0003",
        "grad",
        "norm",
        "1.23",
        "peak",
        "1.1",
        "GiB",
    ),
}


def drawn(width: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Return the lines of events and those of the bar on a terminal of so many columns."""
    screen = io.StringIO()
    monkeypatch.setattr(
        terminal, "Console", lambda **_: Console(file=screen, width=width, force_terminal=True, color_system=None)
    )
    display = terminal.TerminalDisplay(Path())
    display.pause()
    screen.truncate(0)
    plan = {"task": "Digits", "first_step": 0, "num_steps": 30000, "num_epochs": 5, "steps_per_epoch": 6000}
    plan |= {"batch_size": 64, "num_samples": 384000, "num_parameters": 123456789, "reading": "indexed by the batch"}
    display.read({"event": "plan", **plan})
    lines = screen.getvalue().strip("\0\n").split("\n")
    for step in range(1, 120):
        event = {"event": "step", "time": 1000 + step * 0.01, "step": step, "epoch": 0, "loss": 1 / step, "lr": 0.0003}
        display.read({**event, "num_samples": 64, "grad_norm": 1.2341, "scalars": SCALARS})
    display.read({"event": "memory", "step": 1, "host_bytes": 1234567890, "device_bytes": None})
    display.refresh()
    bar = display._bar
    assert bar is not None
    display.pause()
    screen.truncate(0)
    Console(file=screen, width=width).print(*bar.get_renderables())
    return lines, screen.getvalue().strip("\0\n").split("\n")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 160])
def test_nothing_is_cut_mid_word(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, (position, details) = drawn(width, monkeypatch)
    whole = "Digits: 123,456,789 parameters, 384,000 samples (indexed by the batch), 30,000 steps of 64"
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == whole  # wrapped between words
    assert max(len(position), len(details)) <= width
    shown = position.replace("━", " ").split()
    assert {*shown, *details.split()} <= WORDS, (position, details)
    assert "119/30000" in position
    if width >= 40:
        assert "0.008403" in position
    if width >= 60:
        assert details.split("  ") == ["mean loss 0.04505", "lr 0.0003", "grad norm 1.23", "peak 1.1 GiB"]
        assert "left" in position
    if width >= 160:
        assert {*shown, *details.split()} == WORDS


def test_lines_of_numbers_are_wrapped_between_them() -> None:
    line = "epoch 5/12  step 225  mean loss 0.4944  eval_loss 0.9666  accuracy 0.8944"
    assert wrapped(line, 45).split("\n") == [
        "epoch 5/12  step 225  mean loss 0.4944",
        "eval_loss 0.9666  accuracy 0.8944",
    ]
    assert wrapped("a sentence that is long", 10) == "a sentence that is long"
    assert wrapped(line, 200) == line


def test_the_mean_of_an_epoch_that_was_seen_from_its_first_step() -> None:
    state = ProgressState(num_steps=100, num_epochs=25, _steps_per_epoch=4)

    def take(step: int, loss: float, **more: Any) -> str:
        event = {"event": "step", "time": 1.0, "step": step, "epoch": (step - 1) // 4, "loss": loss, "num_samples": 8}
        state.take({**event, **more})
        return fit(state.details(), 100)

    assert take(3, 9.0) == ""  # continued in the middle of an epoch
    assert take(5, 1.0) == "mean loss 1"
    assert take(6, math.nan, skipped=True) == "mean loss 1"
    assert take(7, 4.0, num_samples=4) == "mean loss 2"
    assert take(9, 5.0) == "mean loss 5"


def test_rate_and_time_to_go() -> None:
    state = ProgressState(num_steps=100, num_epochs=1)
    for step in range(1, 11):
        state.take(
            {"event": "step", "time": 1000 + step * 0.5, "step": step, "epoch": 0, "loss": 2.0, "num_samples": 8}
        )
    assert state.speed() == (16, 45)
    assert state.line() == "step 10/100  epoch 1/1  loss 2  16 samples/s  45s left"
    assert [duration(s) for s in (5, 65, 3700)] == ["5.0s", "1m05s", "1h01m"]


def test_a_stream_that_does_not_say_how_long_it_is() -> None:
    state = ProgressState()
    plan = {"event": "plan", "task": "T", "first_step": 0, "num_steps": 9, "num_epochs": None, "steps_per_epoch": None}
    line = state.take({**plan, "batch_size": 8, "num_samples": None, "num_parameters": 12, "reading": "a stream"})
    assert line == "T: 12 parameters, samples (a stream), 9 steps of 8"
    assert state.line() == "step 0/9  epoch 1"


@pytest.mark.parametrize(
    ("data_s", "num_windows", "status", "says"),
    [(2.0, 8, "complete", True), (0.0, 30, "complete", False), (2.0, 2, "complete", False), (2.0, 8, "failed", False)],
)
def test_a_complete_run_of_some_length_ends_with_what_bounded_its_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data_s: float, num_windows: int, status: str, says: bool
) -> None:
    with Follower(tmp_path, ["terminal"]):
        log = EventLog(tmp_path, 0)
        for record in steady([{"forward": 1.0, "data": data_s}], num_windows)[0]:
            log.write(record)
        log.write(EndRecord(status=status, step=1))
        log.close()
    out = capsys.readouterr().err
    assert ("Input bounded the speed" in out) == says
    assert (f"More: instep explain {tmp_path}" in out) == says
    assert "has failed and is off" not in out
