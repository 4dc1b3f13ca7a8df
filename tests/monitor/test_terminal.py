"""What a person sees while a run goes on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from instep.events.schema import EvalRecord, NoticeRecord, PlanRecord, StartRecord, StepRecord
from instep.events.write import EventLog
from instep.monitor.progress import ProgressState, duration
from instep.monitor.terminal import TerminalDisplay


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
    log.write(EvalRecord(step=4, metrics={"accuracy": 0.975}, seconds=0.1))
    log.write(NoticeRecord(text="something [odd]"))
    log.close()


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, capsys: Any) -> None:
    with TerminalDisplay(tmp_path) as display:
        assert display.stream(stream := io.StringIO()) is stream
        write_run(tmp_path)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2 processes on cpu over gloo" in shown.err
    assert "Digits: 1,234 parameters, 40 samples (indexed by the batch), 10 steps of 8" in shown.err
    assert "step 4  accuracy 0.975" in shown.err
    assert "note: something [odd]" in shown.err


def test_quiet_shows_nothing(tmp_path: Path, capsys: Any) -> None:
    with TerminalDisplay(tmp_path, quiet=True):
        write_run(tmp_path)
    assert capsys.readouterr().err == ""


def test_history_is_not_shown_again(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path)
    with TerminalDisplay(tmp_path):
        pass
    assert capsys.readouterr().err == ""


def test_rate_and_time_to_go() -> None:
    state = ProgressState(num_steps=100, num_epochs=1)
    for step in range(1, 11):
        state.take(
            {"event": "step", "time": 1000 + step * 0.5, "step": step, "epoch": 0, "loss": 2.0, "num_samples": 8}
        )
    assert state.samples_per_s == 16
    assert state.eta_s == 45
    assert state.line() == "step 10/100  epoch 1/1  loss 2  16 samples/s  45s to go"
    assert [duration(s) for s in (5, 65, 3700)] == ["5.0s", "1m05s", "1h01m"]
