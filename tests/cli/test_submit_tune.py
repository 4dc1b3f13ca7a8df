"""`instep submit slurm --tune` before it speaks to SLURM: the array that it writes, and what it refuses at once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import commands
from instep.cli.app import app
from instep.tune.folder import SearchFolder

TASK = f"{commands.TESTS / 'tune' / 'tunable.py'}:Plain"
SPACE = ("lr=1e-4..1:log", "--batch-size", "8,16", "--enqueue", "lr=0.1 batch_size=8", "--enqueue", "lr=0.2")
HOW = ("--trials", "6", "--metric", "accuracy:max", "--exact", "--threads", "2", "--parallel", "2", "--keep", "3")


def submit(capsys: Any, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        app(args=["submit", "slurm", *words])
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_the_script_of_an_array(tmp_path: Path, capsys: Any) -> None:
    where = ("--array", "3", "-n", "2", "--gpus-per-node", "4", "--time", "60", "--run-dir", str(tmp_path / "s"))
    code, out, err = submit(
        capsys, TASK, *SPACE, "--tune", *HOW, *where, "--dry-run", "--json", "--", "--mem", "1G", "--tune"
    )
    assert code == 0, err
    assert json.loads(out)["run_dir"] == str(tmp_path / "s")
    assert subprocess.run(["bash", "-n"], input=err, text=True).returncode == 0
    for part in (
        *("#SBATCH --array=0-2", "#SBATCH --cpus-per-task=8", "#SBATCH --mem 1G --tune", "#SBATCH --time=60"),
        f"entry tune {TASK} lr=1e-4..1:log",
        "--keep 3 --trials 6 --metric accuracy:max --parallel 2 --enqueue 'lr=0.1 batch_size=8' --enqueue lr=0.2",
        "--batch-size 8,16",
        "--threads 2 --exact",
        '-n 2 --run-dir "$run_dir" --storage journal --json',
    ):
        assert part in err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("lr=0.1",), "there is nothing to search"),
        (("lr=1..2", "--pruner", "ash"), "pruner='ash' is unknown"),
        (("lr=1..2", "--array", "0"), "array=0 is too small"),
        (("lr=1..2", "--", "--array=0-3"), "--array=0-3 after -- and instep's --array set the same"),
        (("lr=1..2", "--seed", "4"), "seed: 3 there, 4 now"),
    ],
)
def test_refused_before_the_queue(words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: Any) -> None:
    if "--seed" in words:
        SearchFolder(tmp_path).describe({"seed": 3})
    code, _, err = submit(capsys, "--tune", TASK, "--dry-run", "--run-dir", str(tmp_path), *words)
    assert code == 2, err
    assert sentence in err
