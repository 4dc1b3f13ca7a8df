"""What a newcomer trips over is explained: no main guard, breakpoint() in a rank, spawn in a rank, whose frames."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import instep
from commands import run
from tasks import Small

TASK = """
import torch, instep
import torch.nn.functional as F
from dataclasses import dataclass
from torch import nn

@dataclass(kw_only=True)
class T(instep.Task):
    how: str = ""

    def model(self):
        return nn.Sequential(nn.Linear(6, 3))

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def train_data(self):
        return torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64)

    def loss(self, model, batch):
        if torch.is_grad_enabled() and self.how == "break":
            breakpoint()
        if torch.is_grad_enabled() and self.how == "threads":
            print("threads", torch.get_num_threads())
        x, y = batch
        return F.cross_entropy(model(x[:, :5] if self.how == "shape" else x), y)
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "t.py"
    path.write_text(TASK)
    return str(path)


def test_breakpoint_in_a_rank(task: str, tmp_path: Path) -> None:
    done = run("instep", "train", task, "-n", "2", "how=break", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "breakpoint() at t.py:22: rank" in done.stderr
    assert "python TASK.py" in done.stderr
    assert done.stderr.startswith("starting: loading PyTorch and the Task\n")


def test_tracebacks_have_the_users_frames_only(task: str, tmp_path: Path) -> None:
    done = run("instep", "train", task, "-n", "2", "how=shape", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 1
    text = done.stderr.partition("Traceback (most recent call last):")[2]
    assert 't.py", line 26, in loss' in text
    assert "mat1 and mat2 shapes cannot be multiplied" in text
    assert f"{os.sep}torch{os.sep}" not in text
    assert f"{os.sep}instep{os.sep}" not in text


def test_a_task_without_main_guard(task: str, tmp_path: Path) -> None:
    for call in ("instep.main(T)", "instep.train(T())"):
        (path := tmp_path / "unguarded.py").write_text(Path(task).read_text() + call + "\n")
        done = run("instep", "train", str(path), "--steps", "1", cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert f"calls {call.partition('(')[0]}() when it is loaded" in done.stderr
        assert '`if __name__ == "__main__":`' in done.stderr


def test_spawn_in_a_rank(tmp_path: Path) -> None:
    (path := tmp_path / "spawns.py").write_text(
        "import torch.multiprocessing as mp\n\ndef f(i): pass\n\nif __name__ == '__main__': mp.spawn(f, nprocs=2)\n"
    )
    done = run("instep", "run", "-n", "2", str(path))
    assert done.returncode == 2
    assert "the script starts its own ranks (torch.multiprocessing.spawn), and instep has started 2" in done.stderr
    assert run("instep", "run", "-n", "1", str(path)).returncode == 0


def test_openmp_threads_are_heeded(task: str, tmp_path: Path) -> None:
    done = run(
        *("instep", "train", task, "-n", "2", "how=threads", "--steps", "1"),
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "3"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["[rank0] threads 3", "[rank1] threads 3"]


def test_a_program_keeps_its_generators(tmp_path: Path) -> None:
    import random

    import numpy

    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), numpy.random.rand(), float(torch.rand(()))
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    instep.train(Small(), steps=2, batch_size=10, quiet=True, run_dir=str(tmp_path))
    assert (random.random(), numpy.random.rand(), float(torch.rand(()))) == expected
