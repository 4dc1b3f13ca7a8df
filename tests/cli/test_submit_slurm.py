"""`instep submit slurm` before it speaks to SLURM: what it writes, and what it refuses at once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, TESTS, run
from instep.cli.submit_slurm import OPTIONS, plan_job
from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.train.source import load_file, make_task, task_class

TASK = "tests/faults/slow_task.py"


def plan(spec: TrainSpec, *values: str, **asked: Any) -> Any:
    path = TESTS / "faults" / "slow_task.py"
    task = make_task(task_class(load_file(path), path), values)
    defaults = {option.name: option.default for option in OPTIONS}
    return plan_job(task, TASK, list(values), spec, defaults | asked, ())


def test_dry_run(tmp_path: Path) -> None:
    words = [TASK, "pause_s=0.5", "--nodes", "2", "-n", "3", "--exact", "--fresh", "--run-dir", str(tmp_path / "run")]
    done = run(
        "instep", "submit", "slurm", *words, "--dry-run", "--json", "--", "--mem", "1G", env={"PATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {"job_id": None, "run_dir": str(tmp_path / "run"), "script": str(tmp_path / "run" / "submit.sh")}
    assert not (tmp_path / "run").exists()
    assert subprocess.run(["bash", "-n"], input=done.stderr, text=True).returncode == 0
    for part in (f"#SBATCH --chdir={ROOT}", "#SBATCH --mem 1G", "--cpus-per-task=3", f"train {TASK} pause_s=0.5"):
        assert part in done.stderr
    assert "--fresh" not in done.stderr  # done once, when it is submitted; a requeued job goes on


def test_processes_and_cores() -> None:
    job = plan(TrainSpec(), gpus_per_node=4)
    assert (job.processes, job.cpus_per_node) == (4, 4)
    job = plan(TrainSpec(processes=2, data_workers=3), gpus_per_node=4)
    assert (job.processes, job.cpus_per_node) == (2, 8)
    assert plan(TrainSpec(processes=2), cpus_per_node=16).cpus_per_node == 16
    assert plan(TrainSpec(processes="auto")).cpus_per_node is None
    assert plan(TrainSpec(exact=True, batch_size=32, seed=3)).options == (
        "--batch-size",
        "32",
        "--seed",
        "3",
        "--exact",
    )


@pytest.mark.parametrize(
    ("spec", "asked", "part"),
    [
        (TrainSpec(batch_size=4), {"nodes": 8}, "batch_size=4"),
        (TrainSpec(), {"array": "width=1,2"}, "width is neither a field of Slow .its fields: pause_s"),
        (TrainSpec(), {"array": "exact=1,2"}, "neither a field"),
        (TrainSpec(), {"array": "nnodes=1,2"}, "neither a field"),
        (TrainSpec(), {"array": "pause_s=1,soon"}, "pause_s='soon'"),
        (TrainSpec(), {"array": "batch-size=8,0"}, "batch_size=0"),
        (TrainSpec(), {"on_node_failure": "wait"}, "Choose requeue or continue"),
    ],
)
def test_refused_before_the_queue(spec: TrainSpec, asked: dict[str, Any], part: str) -> None:
    with pytest.raises(SpecError, match=part):
        plan(spec, **asked)
