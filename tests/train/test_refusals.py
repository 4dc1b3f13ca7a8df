"""What a Task cannot have, or be given, is named in words."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import instep
from instep.core.errors import CheckpointError, RanksFailed, TaskError
from instep.events.read import read_events
from tasks import Small


def train(task: Any, run_dir: Path, **options: Any) -> instep.Result:
    defaults = {"epochs": 2, "batch_size": 10, "threads": 1, "quiet": True, "run_dir": str(run_dir)}
    return instep.train(task, **defaults | options)


class Crashing(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        raise ValueError("no such column")


def test_an_error_on_several_processes_has_its_file_line_and_log(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        train(Crashing(), tmp_path, processes=2)
    text = str(caught.value)
    assert 'test_refusals.py", line' in text
    assert "ValueError: no such column\n(not restarted: no step has succeeded yet)" in text
    assert f"Output of rank 0: {tmp_path / 'logs'}" in text or f"Output of rank 1: {tmp_path / 'logs'}" in text


class Quasi(Small):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params)


class Sparse(Small):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(params)


@pytest.mark.parametrize(
    ("task", "text"), [(Quasi(), r"LBFGS.step\(\) needs a closure"), (Sparse(), "sparse gradients")]
)
def test_optimizers_that_cannot_work_are_refused(tmp_path: Path, task: Any, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        train(task, tmp_path)


class Loaded(Small):
    def train_data(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*super().train_data()), batch_size=4)


@dataclass(kw_only=True)
class Hidden(Small):
    stop: bool = False


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Loaded(), "The dataset is a DataLoader, which makes batches and their order itself"),
        (Hidden(), r"Hidden.stop is a field, and stop\(\) is a method of every Task"),
    ],
)
def test_what_a_task_cannot_have_is_named(tmp_path: Path, task: Any, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        train(task, tmp_path)


def test_a_batch_larger_than_the_data_is_named(tmp_path: Path) -> None:
    train(Small(), tmp_path, batch_size=64, epochs=1)
    texts = [event.get("text", "") for event in read_events(tmp_path)]
    assert any("batch_size=64 is more than the 43 samples" in text for text in texts)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_is_not_loaded_but_its_conversion_is_offered(tmp_path: Path, legacy: bool) -> None:
    file = tmp_path / "weights.pt"
    torch.save(Small().model().state_dict(), file, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match="convert it: python -c") as caught:
        train(Small(), tmp_path / "run", init_from=str(file))
    program = str(caught.value).partition('python -c "')[2].removesuffix('"')
    subprocess.run([sys.executable, "-c", program], check=True)
    result = train(Small(), tmp_path / "run", init_from=str(file.with_suffix(".safetensors")))
    assert result.status == "complete"
