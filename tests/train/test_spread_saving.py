"""Saving where each rank holds a shard: all save the same step, and what befalls one of them is told by rank 0."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from instep.checkpoint import write_reports
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights, weights_sha256
from instep.core.errors import CheckpointError, NumericsError
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.events.write import EventLog
from instep.train import saver
from instep.train.checkpoint_part import kept_part
from instep.train.saver import Saver
from instep.train.worker import worker_main
from instep.world.world import World
from layouts import spread, update
from ranks import run_ranks
from states import write_state
from tasks import Small

_fsync = os.fsync
_let_go = threading.Event()


class Eventful(Small):
    """In the fifth step rank 1 is asked to stop; in the last one its disk is let go."""

    is_asked: ClassVar[bool] = False

    def loss(self, model: Any, batch: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + torch.is_grad_enabled()
        if self.calls == 5 and self.is_asked and os.environ.get("INSTEP_TEST_RANK") == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.calls == 12:
            _let_go.set()
        return super().loss(model, batch)


class Asked(Eventful):
    is_asked = True


def train(world: World, run_dir: Path, mesh: str, faults: str = "", task: type[Small] = Small, **options: Any) -> Any:
    """Run one rank of a training, with faults on rank 1."""
    os.environ["INSTEP_TEST_RANK"] = str(world.rank)
    if world.rank == 1 and faults:
        os.fsync = {"once": _refuse(1), "always": _refuse(999), "slow": _slow}[faults]
    saver._RETRY_S = 0.0
    given = {"steps": 12, "batch_size": 10, "quiet": True, "check_every": 0, "threads": 1, "mesh": mesh} | options
    return worker_main(world, task(), TrainSpec(**given), RunDirectory(run_dir)).to_json()


def _refuse(times: int) -> Any:
    left = iter(range(times))

    def fsync(fd: int) -> None:
        if threading.current_thread().name == "instep-save" and next(left, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        _fsync(fd)

    return fsync


def _slow(fd: int) -> None:
    if threading.current_thread().name == "instep-save":
        _let_go.wait(20)
    _fsync(fd)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == kind]


def run(run_dir: Path, mesh: str, *more: Any, **options: Any) -> list[Any]:
    num_ranks = 2 if mesh in ("fsdp=2", "dp=2") else 1
    return run_ranks(_train, num_ranks, run_dir, mesh, more, options)


def _train(world: World, run_dir: Path, mesh: str, more: Any, options: Any) -> Any:
    return train(world, run_dir, mesh, *more, **options)


def test_a_run_goes_on_under_other_strategies_and_ends_where_one_process_does(tmp_path: Path) -> None:
    (alone,) = run(tmp_path / "alone", "dp=1")
    whole, parts = load_weights(tmp_path / "alone"), tmp_path / "parts"
    for steps, mesh in ((3, "fsdp=2"), (6, "dp=2"), (9, "fsdp=2"), (12, "dp=1")):
        answers = run(parts, mesh, steps=steps)
        assert answers[0]["weights_sha256"] == answers[-1]["weights_sha256"] == weights_sha256(load_weights(parts))
    assert answers[0]["loss"] == pytest.approx(alone["loss"], rel=1e-9)
    for name, tensor in load_weights(parts).items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-9, atol=1e-12)


def test_all_ranks_save_when_it_is_time_by_the_clock_of_rank_0(tmp_path: Path) -> None:
    run(tmp_path, "fsdp=2", save_every="0.01s", keep=99)
    saved = [event["step"] for event in events(tmp_path, "save")]
    assert len(saved) > 2
    assert saved[-1] == 12
    assert sorted(saved, reverse=True) == [
        Checkpoint(tmp_path / "checkpoints" / name).step for name in RunDirectory(tmp_path).names()
    ]


def test_the_best_is_saved_when_it_is_found(tmp_path: Path) -> None:
    run(tmp_path, "fsdp=2", save_every="never", keep=9, keep_best="eval_loss:min", eval_every="4")
    losses = {event["step"]: event["metrics"]["eval_loss"] for event in events(tmp_path, "eval")}
    assert min(losses, key=lambda step: losses[step]) in {event["step"] for event in events(tmp_path, "save")}


def test_a_rank_that_is_asked_to_stop_has_all_of_them_save(tmp_path: Path) -> None:
    answers = run(tmp_path, "fsdp=2", "", Asked, save_every="never")
    assert [each["status"] for each in answers] == ["preempted"] * 2
    assert RunDirectory(tmp_path).names() == ["step-00000005"]
    assert run(tmp_path, "dp=1")[0]["steps"] == 12


def test_a_disk_that_refuses_one_rank_is_told_and_tried_again(tmp_path: Path) -> None:
    whole = run(tmp_path / "undisturbed", "fsdp=2")[0]
    answers = run(tmp_path, "fsdp=2", "once", save_every="4")[0]
    (failed,) = events(tmp_path, "save_failed")
    assert failed["step"] == 4
    assert "on rank 1, the disk (or the quota) is full" in failed["error"]
    assert [event["step"] for event in events(tmp_path, "save")][-1] == 12
    assert answers["weights_sha256"] == whole["weights_sha256"]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_last_checkpoint_that_one_rank_cannot_write_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"on rank 1, the disk .* is full.*Then run the same command again"):
        run(tmp_path, "fsdp=2", "always", save_every="never")
    assert RunDirectory(tmp_path).names() == []


def test_a_save_is_skipped_while_one_rank_still_writes(tmp_path: Path) -> None:
    run(tmp_path, "fsdp=2", "slow", Eventful, save_every="3", save_busy="skip", keep=9)
    assert any("step 6 is skipped" in event["text"] for event in events(tmp_path, "notice"))
    assert [event["step"] for event in events(tmp_path, "save")] == [3, 12]
    assert all(event["stall_s"] < 10 for event in events(tmp_path, "save")), "20 s were it to wait for the disk"


def lose(world: World, run_dir: Path) -> str:
    """Save weights of which rank 1 has lost some."""
    _, trained = spread(world, "fsdp@2")
    update(trained)
    log = EventLog(run_dir, world.rank)
    it = Saver(trained.strategy, TrainSpec(), RunDirectory(run_dir), log)
    if world.rank == 1:
        with torch.no_grad():
            trained.model.large.weight._local_tensor[0, 0] = float("nan")
    it.restore(*trained.parts())
    it.save(3, {}, may_skip=False)
    answers = ""
    try:
        it.finish()
    except NumericsError as error:
        answers = str(error)
    world.barrier()
    log.close()
    return answers


def test_weights_that_one_rank_has_lost_are_not_saved(tmp_path: Path) -> None:
    answers = run_ranks(lose, 2, tmp_path)
    assert "the weights of step 3 are not finite" in answers[0]
    assert answers[1] == ""
    assert RunDirectory(tmp_path).names() == []


def leave_alone(world: World, run_dir: Path) -> float:
    """End on rank 1 before its share is written, and close on rank 0."""
    write_reports.SHORT_TIMEOUT_S = 0.5
    _, trained = spread(world, "fsdp@2")
    log = EventLog(run_dir, world.rank)
    it = Saver(trained.strategy, TrainSpec(), RunDirectory(run_dir), log)
    if world.rank == 1:
        it._write = lambda *_: None  # type: ignore[method-assign,assignment]
    it.restore(*trained.parts())
    it.save(3, {}, may_skip=False)
    begun = time.monotonic()
    it.close()
    log.close()
    world.barrier()
    return time.monotonic() - begun


def test_after_an_error_rank_0_does_not_wait_long_for_a_rank_that_is_gone(tmp_path: Path) -> None:
    assert max(run_ranks(leave_alone, 2, tmp_path)) < 5
    (failed,) = events(tmp_path, "save_failed")
    assert "on rank 1, no sign of life" in failed["error"]
    assert RunDirectory(tmp_path).names() == []


def read_elsewhere(world: World, run_dir: Path, damage: bool) -> tuple[int, list[str], str]:
    """Continue from a checkpoint; rank 1 is on a node of its own, where files may arrive damaged."""
    read: list[str] = []
    verify = Checkpoint.verify

    def watched(self: Checkpoint, files: Any) -> None:
        read.extend(files)
        verify(self, files)
        if damage and world.rank == 1:
            raise CheckpointError("model.safetensors is damaged here.")

    Checkpoint.verify = watched  # type: ignore[method-assign]
    if world.rank == 1:
        socket.gethostname = lambda: "elsewhere"
    _, trained = spread(world, "ddp@2")
    log = EventLog(run_dir, world.rank)
    try:
        step, answers = Saver(trained.strategy, TrainSpec(), RunDirectory(run_dir), log).step, ""
    except CheckpointError as error:
        step, answers = 0, str(error)
    log.close()
    return step, read, answers


def test_files_are_verified_once_on_each_machine(tmp_path: Path) -> None:
    write_state(tmp_path / "checkpoints", 7, {"model": {"w": torch.ones(3)}, "progress": {"step": 7}})
    (step, here, _), (other_step, there, _) = run_ranks(read_elsewhere, 2, tmp_path, False)
    assert (step, other_step) == (7, 7)
    assert sorted(here) == ["model.safetensors", "state.json"]
    assert there == ["state.json"]  # the second of two local ranks verifies every second file
    answers = [text for _, _, text in run_ranks(read_elsewhere, 2, tmp_path, True)]
    assert answers[0] == answers[1]
    assert "rank 1: model.safetensors is damaged here. Rank 0 can read it" in answers[0]


class Average:
    """An average of a model's weights, sharded as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach() * 2 for name, p in model.named_parameters(remove_duplicate=False)}
        self.note = "none"

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values), "note": self.note}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert set(state["values"]) == set(self.values)
        self.values, self.note = state["values"], state["note"]


def keep(world: World, run_dir: Path, layout: str, step: int) -> tuple[float, str]:
    """Keep an average besides the model; give how far it is from twice the weights."""
    _, trained = spread(world, layout, seed=step)
    log = EventLog(run_dir, world.rank)
    it = Saver(trained.strategy, TrainSpec(), RunDirectory(run_dir), log)
    average = Average(trained.model)
    average.note = "rank 0's" if world.is_main else "another's"
    it.restore(*trained.parts(), kept_part("average", average, trained.strategy))
    differences = [(average.values[name] - p.detach() * 2).abs().sum() for name, p in trained.model.named_parameters()]
    result = max(float(d.full_tensor() if hasattr(d, "full_tensor") else d) for d in differences), average.note
    it.end_restore()
    it.save(step, {}, may_skip=False)
    it.finish()
    world.barrier()
    log.close()
    return result


def test_what_is_kept_besides_is_sharded_too(tmp_path: Path) -> None:
    run_ranks(keep, 2, tmp_path, "fsdp@2", 1)
    for step, (layout, num_ranks) in enumerate([("pipeline@2", 2), ("fsdp@2", 2), ("single", 1)], 2):
        assert run_ranks(keep, num_ranks, tmp_path, layout, step) == [(0.0, "rank 0's")] * num_ranks
