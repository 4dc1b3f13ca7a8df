"""What the tests on SLURM train, and how they look at it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from commands import TESTS, run
from slurm_cluster import SlurmCluster

TASK = str(TESTS / "faults" / "slow_task.py")
RECIPE = ["--batch-size", "8", "--drop-last", "--exact", "--shards", "4", "--seed", "5"]


def instep(slurm: SlurmCluster, *words: str, timeout_s: float = 100, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command as a person on a login node does."""
    return run("instep", *words, env=slurm.env, timeout_s=timeout_s, **more)


def submit(slurm: SlurmCluster, run_dir: Path, *words: str) -> str:
    """Submit the slow Task; give the job's number."""
    done = instep(slurm, "submit", "slurm", TASK, *RECIPE, "--run-dir", str(run_dir), "--json", *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["run_dir"] == str(run_dir)
    assert Path(told["script"]).read_text().startswith("#!/bin/bash\n")
    return str(told["job_id"])


def result(run_dir: Path, job: str = "") -> dict[str, Any]:
    """Read the result of a run that must be complete."""
    path = run_dir / "result.json"
    logs = "\n".join(log.read_text()[-3000:] for log in (run_dir / "logs").glob(f"slurm-*{job}.out"))
    assert path.exists(), logs
    return json.loads(path.read_text())
