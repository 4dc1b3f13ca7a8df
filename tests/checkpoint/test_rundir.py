"""The rules of a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import instep
from instep.checkpoint.manifest import checkpoint_name
from instep.checkpoint.policy import RetentionPolicy
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError
from tasks import Small


def train(run_dir: Path, task: Any = None, **options: Any) -> instep.Result:
    options = {"batch_size": 10, "threads": 1, "quiet": True, "run_dir": str(run_dir), "epochs": 2} | options
    return instep.train(task or Small(), **options)


class Scheduled(Small):
    def scheduler(self, optimizer: Any, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)


class Warm(Small):
    def scheduler(self, optimizer: Any, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))


def test_a_complete_run_is_not_trained_again(tmp_path: Path, capsys: Any) -> None:
    first = train(tmp_path)
    again = train(tmp_path, quiet=False)
    assert again == first
    assert "is complete: nothing is left to do" in capsys.readouterr().err


def test_more_epochs_go_on_and_equal_a_longer_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", epochs=4)
    train(tmp_path / "parts", epochs=2)
    more = train(tmp_path / "parts", epochs=4)
    assert more.weights_sha256 == whole.weights_sha256
    assert more.loss == whole.loss
    assert more.steps == 20


def test_more_epochs_are_refused_where_the_schedule_depends_on_them(tmp_path: Path) -> None:
    train(tmp_path / "a", Scheduled())
    with pytest.raises(CheckpointError, match="epochs: 2 there, 4 now, and the Task's scheduler depends on it"):
        train(tmp_path / "a", Scheduled(), epochs=4)
    train(tmp_path / "b", Warm())
    assert train(tmp_path / "b", Warm(), epochs=3).epochs == 3
    with pytest.raises(CheckpointError, match="epochs: 3 there, 1 now"):
        train(tmp_path / "b", Warm(), epochs=1)


def test_a_scheduled_run_continues_its_schedule(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", Scheduled(), epochs=3, save_every="4", keep=99)
    source, target = tmp_path / "whole", tmp_path / "parts"
    train(target, Scheduled(), epochs=3)
    import shutil

    shutil.rmtree(target / "checkpoints")
    (target / "result.json").unlink()
    shutil.copytree(source / "checkpoints" / "step-00000008", target / "checkpoints" / "step-00000008")
    assert train(target, Scheduled(), epochs=3).weights_sha256 == whole.weights_sha256


def test_a_run_from_before_there_was_a_choice_of_precision_goes_on(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    spec = json.loads((tmp_path / "spec.json").read_text())
    del spec["recipe"]["precision"], spec["spec"]["precision"], spec["recipe"]["lr_schedule"]
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    assert train(tmp_path, epochs=2).epochs == 2
    with pytest.raises(CheckpointError, match="precision: 'fp32' there, 'bf16' now"):
        train(tmp_path, epochs=3, precision="bf16")


def test_operational_settings_may_change(tmp_path: Path) -> None:
    first = train(tmp_path, save_every="2", keep=2)
    assert train(tmp_path, save_every="10m", keep=7, eval_every="never", max_restarts=0) == first


def test_fresh_moves_the_old_run_aside(tmp_path: Path) -> None:
    first = train(tmp_path / "run")
    second = train(tmp_path / "run", seed=1, fresh=True)
    assert second.weights_sha256 != first.weights_sha256
    assert RunDirectory(tmp_path / "run.old-1").result() == first.to_json()


def test_new_directories_get_new_names(tmp_path: Path) -> None:
    names = {RunDirectory.create("digits", tmp_path).path.name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("digits-") for name in names)


def test_another_machine_is_just_writing_the_spec(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".spec.json.other-machine.17").write_text("{")
    assert RunDirectory.open(tmp_path, job="the job a at b").path == tmp_path
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"holds no spec\.json"):
        RunDirectory.open(tmp_path, job="the job a at b")


def test_machines_that_have_not_met_do_not_train_in_one_directory(tmp_path: Path) -> None:
    first, second, stranger = (RunDirectory(tmp_path) for _ in range(3))
    for directory in (first, second, stranger):
        directory.lock("the job instep at localhost:29400")  # each means itself
    first.claim("a")
    second.claim("a")
    with pytest.raises(CheckpointError, match="has not met"):
        stranger.claim("b")
    for directory in (first, second, stranger):
        directory.unlock()
    stranger.claim("b")
    stranger.unlock()


def test_a_damaged_newest_checkpoint_falls_back(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    train(tmp_path / "run", save_every="4")
    (tmp_path / "run" / "result.json").unlink()
    newest = RunDirectory(tmp_path / "run").names()[0]
    (tmp_path / "run" / "checkpoints" / newest / "model.safetensors").write_bytes(b"")
    assert train(tmp_path / "run", save_every="4").weights_sha256 == whole.weights_sha256


def test_where_to_go_back_to_stays() -> None:
    names = [checkpoint_name(step) for step in (2, 4, 6, 8, 10)]
    assert RetentionPolicy(newest=2).to_prune(names, {}) == [checkpoint_name(6), checkpoint_name(4), checkpoint_name(2)]
    assert RetentionPolicy(newest=2, trusted=5).to_prune(names, {}) == [checkpoint_name(6), checkpoint_name(2)]
    assert RetentionPolicy(newest=2, trusted=1).to_prune(names, {}) == [
        checkpoint_name(6),
        checkpoint_name(4),
        checkpoint_name(2),
    ]
    assert RetentionPolicy(newest=2, trusted=99).to_prune(names, {}) == [
        checkpoint_name(6),
        checkpoint_name(4),
        checkpoint_name(2),
    ]
