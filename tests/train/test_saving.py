"""Saving beside the training: what it waits for, what it keeps, and what it does when the disk refuses."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import instep
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.snapshot import FlatState, HostBuffer
from instep.core.errors import CheckpointError, SpecError, TaskError
from instep.events import write
from instep.events.read import read_events
from instep.train import saver
from tasks import Small

_fsync = os.fsync


def train(run_dir: Path, **options: Any) -> instep.Result:
    return instep.train(Small(), **{"steps": 12, "batch_size": 10, "quiet": True, "run_dir": str(run_dir)} | options)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == kind]


def in_background() -> bool:
    return threading.current_thread().name == "instep-save"


def test_a_snapshot_is_of_its_moment_and_its_memory_is_used_again() -> None:
    stage, weight = HostBuffer(), torch.arange(6.0).view(2, 3)
    first = stage.take(FlatState.of({"model": {"w": weight.t()}, "progress": {"step": 1}}))
    place = first.tensors["model"]["w"].data_ptr()
    weight.zero_()
    assert first.tensors["model"]["w"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert stage.take(FlatState.of({"model": {"w": weight.t()}})).tensors["model"]["w"].data_ptr() == place
    assert stage.take(FlatState.of({"model": {"w": weight.double()}})).tensors["model"]["w"].dtype == torch.float64


def test_a_save_does_not_hold_up_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a disk that takes a second for each file, twelve steps are over long before their checkpoint is."""

    def slow(fd: int) -> None:
        if in_background():
            time.sleep(1.0)
        _fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    train(tmp_path, save_every="3", save_busy="skip")
    (first, last), steps = events(tmp_path, "save"), events(tmp_path, "step")
    assert first["step"] == 3
    assert first["seconds"] > 2
    assert first["stall_s"] < first["seconds"] / 2
    assert steps[-1]["time"] < first["time"]
    assert last["step"] == 12
    assert "step 6 is skipped" in events(tmp_path, "notice")[0]["text"]


class Killable(Small):
    """Notes in the step after a checkpoint which steps a kill would leave in the log."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(num_samples=400)  # no epoch ends, which would be written at once
        self.run_dir = run_dir
        self.logged: list[int] = []

    def on_step(self, record: Any) -> None:
        if record.step == 5:
            self.logged = [event["step"] for event in read_events(self.run_dir) if event["event"] == "step"]


def test_the_steps_of_a_checkpoint_are_in_the_log_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "FLUSH_S", 3600.0)
    task = Killable(tmp_path / "run")
    instep.train(task, run_dir=str(tmp_path / "run"), steps=6, batch_size=4, save_every="4", quiet=True)
    assert task.logged[:4] == [1, 2, 3, 4]


def test_or_the_next_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: (time.sleep(0.05), _fsync(fd))[1])
    train(tmp_path, save_every="3", keep=9)
    assert [event["step"] for event in events(tmp_path, "save")] == [3, 6, 9, 12]
    assert RunDirectory(tmp_path).names() == [f"step-{step:08d}" for step in (12, 9, 6, 3)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_is_told_and_tried_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = iter([True, True])

    def refuse(fd: int) -> None:
        if in_background() and next(failing, False):
            raise OSError(number, os.strerror(number))
        _fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(saver, "_RETRY_S", 0.0)
    whole = train(tmp_path, save_every="4")
    assert [event["step"] for event in events(tmp_path, "save_failed")][:1] == [4]
    assert "Earlier checkpoints are untouched" in events(tmp_path, "save_failed")[0]["error"]
    assert len(events(tmp_path, "save_failed")) == 2
    newest, complaints = RunDirectory(tmp_path).newest()
    assert (newest and newest.step, complaints) == (12, [])
    assert not list((tmp_path / "checkpoints").glob(".*"))
    monkeypatch.undo()
    assert train(tmp_path / "undisturbed").weights_sha256 == whole.weights_sha256


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        if in_background():
            raise OSError(errno.ENOSPC, "No space left on device")
        _fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match=r"the disk .* is full"):
        train(tmp_path)
    assert not (tmp_path / "result.json").exists()
    monkeypatch.undo()
    assert train(tmp_path).steps == 12


def test_checkpoints_are_kept_as_asked(tmp_path: Path) -> None:
    train(tmp_path, save_every="1", keep=2, keep_every=5, keep_best="eval_loss:min", eval_every="4")
    losses = {event["step"]: event["metrics"]["eval_loss"] for event in events(tmp_path, "eval")}
    best = min(losses, key=lambda step: losses[step])
    assert {Checkpoint(tmp_path / "checkpoints" / name).step for name in RunDirectory(tmp_path).names()} == {
        5, 10, 11, 12, best,
    }  # fmt: skip


def test_the_best_is_saved_when_it_is_found(tmp_path: Path) -> None:
    train(tmp_path, save_every="never", keep=9, keep_best="eval_loss:min", eval_every="4")
    losses = {event["step"]: event["metrics"]["eval_loss"] for event in events(tmp_path, "eval")}
    best = min(losses, key=lambda step: losses[step])
    assert best in {event["step"] for event in events(tmp_path, "save")}
    with pytest.raises(TaskError, match=r"keep_best=f1: there is no such metric\. This Task has eval_loss"):
        train(tmp_path / "other", keep_best="f1", eval_every="4")


class Scored(Small):
    """Scores 0 first, and never better."""

    step = 0

    def on_step(self, record: Any) -> None:
        self.step = record.step + 1

    def metrics(self, model: Any, batch: Any) -> Any:
        return {"score": torch.full((len(batch[1]),), {5: 0.0, 10: -5.0, 15: -2.0}.get(self.step, -9.0))}


def test_a_best_score_of_zero_is_a_score(tmp_path: Path) -> None:
    options = {"save_every": "10", "eval_every": "5", "keep": 9, "keep_best": "score"}
    instep.train(Scored(), steps=20, batch_size=10, quiet=True, run_dir=str(tmp_path), **options)
    assert [event["metrics"]["score"] for event in events(tmp_path, "eval")] == [0.0, -5.0, -2.0, -9.0]
    assert [event["step"] for event in events(tmp_path, "save")] == [5, 10, 20]  # 15 is better than 10, not than 5


def test_the_best_is_not_forgotten_when_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = iter([True])

    def refuse(fd: int) -> None:
        if in_background() and next(failing, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        _fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    train(tmp_path, save_every="never", keep=9, keep_best="eval_loss:min", eval_every="2")
    losses = {event["step"]: event["metrics"]["eval_loss"] for event in events(tmp_path, "eval")}
    saved = [event["step"] for event in events(tmp_path, "save")]
    failed = events(tmp_path, "save_failed")[0]["step"]
    later = [step for step in losses if step > failed]
    assert later
    assert min(later, key=lambda step: losses[step]) in saved


def test_what_no_checkpoint_can_hold_is_an_error_at_once(tmp_path: Path) -> None:
    class Complex(Small):
        def model(self) -> torch.nn.Module:
            model = super().model()
            model.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
            return model

    with pytest.raises(TaskError, match=r"phase is of torch\.complex64, which a checkpoint cannot hold"):
        instep.train(Complex(), steps=12, batch_size=10, save_every="4", quiet=True, run_dir=str(tmp_path))
    assert not events(tmp_path, "step")


def test_weights_of_every_float_are_looked_at() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2):
        good = torch.ones(4).to(dtype)
        assert saver._is_finite(good)
        good[2] = float("nan")
        assert not saver._is_finite(good)
    assert saver._is_finite(torch.zeros(0))
    assert saver._is_finite(torch.ones(3, dtype=torch.int64))


def test_how_often_is_chosen_from_what_a_save_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "FIRST_SAVE_S", 1e-6)
    train(tmp_path, save_every="auto:6h")
    assert "for a failure every 6 h one every" in events(tmp_path, "notice")[0]["text"]
    with pytest.raises(SpecError, match="is not an interval"):
        instep.TrainSpec(save_every="auto:soon")


def test_what_a_job_beside_the_training_raises_is_raised_where_it_is_collected() -> None:
    background: Any = saver.Background()
    assert background.collect() is None
    background.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        background.collect()
    background.start(lambda: 7)
    assert background.collect() == 7
