"""`instep evaluate` and `instep predict` as a person types them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest

import instep
from commands import ROOT, result_of, run, start, wait_for
from instep.checkpoint.rundir import RunDirectory
from instep.train.source import load_file

DIGITS = ROOT / "examples" / "digits.py"
SLOW = """
import sys, time
sys.path.insert(0, {examples!r})
import digits, torch

class Slow(digits.Digits):
    def predict(self, model, batch):
        open({marker!r}, "w").close()
        time.sleep(0.1)
        return model(batch[0])
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digits") / "run"
    digits: Any = load_file(DIGITS)
    instep.train(digits.Digits(hidden=32), epochs=1, exact=True, run_dir=str(path), quiet=True)
    return path


def test_the_commands(run_dir: Path, tmp_path: Path) -> None:
    trained, out = RunDirectory(run_dir).result(), tmp_path / "digits.npz"
    assert trained is not None
    evaluated = result_of(run("instep", "evaluate", str(run_dir), "-n", "2", "--json"))
    assert evaluated == {
        "metrics": trained["metrics"],
        "step": trained["steps"],
        "checkpoint": str(run_dir / "checkpoints" / "step-00000023"),
        "run_dir": str(run_dir),
        "num_samples": 360,
        "world_size": 2,
    }
    predicted = result_of(run("instep", "predict", str(run_dir), "--out", str(out), "-n", "3", "--json"))
    assert predicted["out"] == str(out)
    assert predicted["num_samples"] == 360
    with numpy.load(out) as table:
        assert predicted["columns"] == [name for name in table if name != "index"]
        assert table["index"].tolist() == list(range(360))


def test_ctrl_c_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    task, marker = tmp_path / "slow.py", tmp_path / "begun"
    task.write_text(SLOW.format(examples=str(DIGITS.parent), marker=str(marker)))
    words = ("--out", str(tmp_path / "out.csv"), "--task", f"{task}:Slow", "-n", "2")
    env = {"TMPDIR": str(tmp_path)}
    process = start("instep", "predict", str(run_dir), *words, env=env)
    try:
        wait_for(marker.exists, 40)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert f"interrupted. {tmp_path / 'out.csv'} was not written." in err
    left = {entry.name for entry in tmp_path.iterdir()} - {"__pycache__"}  # of slow.py, where Python writes byte code
    assert left == {"begun", "slow.py"}
