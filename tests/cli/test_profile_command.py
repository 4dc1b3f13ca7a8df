"""`--profile` on the command line: of a plain script, of a training that is restarted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import commands
from instep.profile.trace import TraceInfo, read_trace

SCRIPT = commands.TESTS / "launch" / "scripts" / "steps.py"
KILLED = '''
import os, signal
from dataclasses import dataclass
from pathlib import Path
import torch
from torch import nn
import instep

@dataclass(kw_only=True)
class Killed(instep.Task):
    """Kills rank 1 once, in its step `at`."""
    at: int = 0

    def model(self): return nn.Linear(4, 1)
    def optimizer(self, params): return torch.optim.SGD(params, lr=0.1)
    def train_data(self): return torch.utils.data.TensorDataset(torch.linspace(0, 1, 256).reshape(64, 4))

    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        flag = Path(self.run_dir) / "killed"
        if self.calls == self.at and os.environ.get("RANK") == "1" and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch[0]).square().mean()
'''


def infos(folder: Path) -> list[TraceInfo]:
    return [read_trace(path).info for path in sorted((folder / "profile").glob("rank-*.trace.json.gz"))]


def test_a_plain_script_is_profiled_and_its_last_words_name_what_holds_memory(tmp_path: Path) -> None:
    words = ["--profile", "3:5", "--profile-ranks", "all", "--log-dir", str(tmp_path)]
    done = commands.run("instep", "run", "-n", "2", *words, str(SCRIPT), "8", "more", "--profile")
    assert done.returncode == 3, done.stderr
    assert "[rank0] profile True" in done.stdout  # its own option
    assert [(info.rank, info.first, info.last, info.memory_step) for info in infos(tmp_path)] == [
        (0, 3, 4, 5),
        (1, 3, 4, 5),
    ]
    assert "profile of steps 3 to 4:\n  rank 0: " in done.stderr
    assert f"{tmp_path}/profile/summary.md" in done.stderr
    [rank, _] = json.loads((tmp_path / "profile" / "summary.json").read_text())["ranks"]
    assert {"data", "forward", "backward", "optimizer"} <= set(rank["phases"])
    assert rank["communication"]["seconds"] > 0
    assert rank["holders"][0]["module"].endswith("0")
    assert "ran out of memory in steps.py:" in done.stderr
    assert "The largest holders by module: module.0 " in done.stderr
    assert "USDT" not in done.stderr  # what torch's profiler prints


@pytest.mark.parametrize("words", [("--profile", "5:5"), ("--profile-ranks", "1")])
def test_what_cannot_be_profiled_is_refused(words: tuple[str, ...]) -> None:
    done = commands.run("instep", "run", *words, str(SCRIPT), "1")
    assert done.returncode == 2
    assert done.stderr.startswith("instep: profile")


@pytest.mark.slow  # train/test_profiling.py::test_what_a_restart_profiles is in make test
@pytest.mark.parametrize(
    ("at", "attempt", "steps"),
    [
        (9, 0, (5, 6, 7)),  # killed after them: the profile stays, though a restart makes some of them again
        (6, 1, (5, 6, 7)),  # killed in them, resumed before them: they come again
    ],
)
def test_a_restart(at: int, attempt: int, steps: tuple[int, ...], tmp_path: Path) -> None:
    file, run_dir = tmp_path / "killed.py", tmp_path / "run"
    file.write_text(KILLED)
    words = ["--steps", "12", "--batch-size", "8", "--profile", "5:8", "--profile-ranks", "all"]
    saving = ["--save-every", "3", "--run-dir", str(run_dir), "--json"]
    done = commands.run("instep", "train", str(file), f"at={at}", "-n", "2", *words, *saving)
    result = commands.result_of(done)
    assert (result["steps"], result["restarts"]) == (12, 1)
    traces = infos(run_dir)
    assert [(info.rank, info.first, info.last, info.is_whole) for info in traces] == [
        (rank, steps[0], steps[-1], True) for rank in (0, 1)
    ]
    starts = [json.loads(line) for line in (run_dir / "events" / "rank-1.jsonl").read_text().splitlines()]
    pids = [event["pid"] for event in starts if event["event"] == "start"]
    assert traces[1].pid == pids[attempt]
    assert "profile of steps 5 to 7:" in done.stderr
    assert not [path for path in os.listdir(run_dir / "profile") if path.startswith(".")]
