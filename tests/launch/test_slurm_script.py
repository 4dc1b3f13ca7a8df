"""The batch script: its directives, its command with odd names, and what it does when the step ends."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instep.core.errors import SpecError
from instep.launch.slurm.client import parse_queue
from instep.launch.slurm.job import SubmitSpec, Sweep, time_limit_s
from instep.launch.slurm.script import batch_script

PLAIN = SubmitSpec(
    name="digits",
    python="/opt/env/bin/python",
    cwd=Path("/home/me"),
    run_dir=Path("/home/me/runs/digits-1"),
    task="digits.py:Digits",
    values=("lr=3e-4",),
    options=("--epochs", "5"),
    processes=4,
    nodes=2,
    gpus_per_node=4,
    cpus_per_node=4,
    time="2:00:00",
    partition="gpu",
)
ODD = 'it\'s $HOME; "x" `id` \\ # é *'


def directives(spec: SubmitSpec) -> list[str]:
    lines = batch_script(spec).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def stub(folder: Path, name: str, *lines: str) -> None:
    """Write a stand-in for a program of SLURM."""
    (folder / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
    (folder / name).chmod(0o755)


def run_script(spec: SubmitSpec, folder: Path, state: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script in bash with the srun of the folder and a squeue that prints `state`."""
    stub(folder, "squeue", f"echo {state}")
    stub(folder, "scontrol", 'echo "$@" >> requeued')
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "40007", "SLURMD_NODENAME": "node7", **variables}
    (folder / "job.sh").write_text(batch_script(spec))
    return subprocess.run(["bash", "job.sh"], env=env, capture_output=True, text=True, cwd=folder)


def words_of(spec: SubmitSpec, tmp_path: Path, **variables: str) -> list[str]:
    """Return the arguments with which the script calls srun."""
    stub(tmp_path, "srun", 'printf "%s\\0" "$@" > words')
    done = run_script(spec, tmp_path, "COMPLETING/None", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return (tmp_path / "words").read_text().split("\0")[:-1]


def test_what_slurm_is_asked_for() -> None:
    actual = directives(PLAIN)
    for line in (
        "--job-name=digits",
        "--comment=instep",
        "--chdir=/home/me",
        "--output=/home/me/runs/digits-1/logs/slurm-%j.out",
        "--open-mode=append",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--gpus-per-node=4",
        "--time=2:00:00",
        "--partition=gpu",
        "--signal=B:USR1@120",
        "--requeue",
    ):
        assert line in actual
    assert "--no-requeue" in directives(replace(PLAIN, requeue=False))
    assert "scontrol requeue" not in batch_script(replace(PLAIN, requeue=False))
    assert "--no-kill" in directives(replace(PLAIN, on_node_failure="continue"))
    assert (
        directives(replace(PLAIN, sbatch_options=("--mem", "10G", "--account=a b")))[-1] == '--mem 10G --account="a b"'
    )


def test_the_command_on_each_node(tmp_path: Path) -> None:
    words = words_of(PLAIN, tmp_path)
    at = words.index("/opt/env/bin/python")
    assert words[:at] == ["--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=4"]
    assert words[at + 1 :] == [
        *("-m", "instep.cli.entry", "train", "digits.py:Digits", "lr=3e-4", "--epochs", "5", "-n", "4"),
        *("--run-dir", "/home/me/runs/digits-1", "--nnodes", "2", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "node7:25007", "--rdzv-id", "40007-0"),
    ]
    words = words_of(replace(PLAIN, on_node_failure="continue"), tmp_path, SLURM_RESTART_COUNT="2")
    assert words[words.index("--nnodes") + 1] == "1:2"
    assert words[-1] == "40007-2"
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)
    words = words_of(replace(PLAIN, nodes=1), tmp_path)
    assert words[words.index("--rdzv-endpoint") + 1] == "127.0.0.1:0"


def test_odd_words_come_through(tmp_path: Path) -> None:
    run_dir = Path("/data") / ODD.replace("/", "")
    spec = replace(PLAIN, task=f"{ODD}.py", values=(f"name={ODD}",), options=("--mesh", ODD), run_dir=run_dir)
    words = words_of(replace(spec, env=(f"ODD={ODD}",), prelude=('echo "$ODD" > from_prelude',)), tmp_path)
    assert f"{ODD}.py" in words
    assert f"name={ODD}" in words
    assert words[words.index("--mesh") + 1] == ODD
    assert words[words.index("--run-dir") + 1] == str(run_dir)
    assert (tmp_path / "from_prelude").read_text() == ODD + "\n"
    assert '--account="it\'s \\"x\\" # \\\\"' in directives(
        replace(PLAIN, sbatch_options=('--account=it\'s "x" # \\',))
    )
    assert "--output=/a%%b/logs/slurm-%j.out" in directives(replace(PLAIN, run_dir=Path("/a%b")))


def test_an_array(tmp_path: Path) -> None:
    spec = replace(PLAIN, sweep=Sweep.parse(f"name=a b,{ODD},3"))
    assert "--array=0-2" in directives(spec)
    words = words_of(spec, tmp_path, SLURM_ARRAY_TASK_ID="1")
    assert f"name={ODD}" in words
    assert words[words.index("--run-dir") + 1] == "/home/me/runs/digits-1/1"
    option = replace(
        PLAIN, sweep=Sweep(name="batch_size", values=("8", "16"), words=("--batch-size=8", "--batch-size=16"))
    )
    words = words_of(replace(option, options=("--batch-size", "4")), tmp_path, SLURM_ARRAY_TASK_ID="1")
    assert words.index("--batch-size=16") > words.index("--batch-size")  # what comes last counts
    own = replace(PLAIN, sbatch_options=("--array=3-5",))  # sbatch's own: each job still has a run directory of its own
    assert any(line.endswith("slurm-%A_%a.out") for line in directives(own))
    words = words_of(own, tmp_path, SLURM_ARRAY_TASK_ID="4")
    assert words[words.index("--run-dir") + 1] == "/home/me/runs/digits-1/4"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"values": ("a=b\nrm -rf x",)}, "line break"),
        ({"sbatch_options": ("--account=a\n#SBATCH --x",)}, "line break"),
        ({"run_dir": Path("/a\rb")}, "line break"),
        ({"prelude": ("a\nb",)}, "source FILE"),
        ({"env": ("A-B=1",)}, "Write NAME=VALUE"),
        ({"env": ("A",)}, "Write NAME=VALUE"),
        ({"nodes": 0}, "nodes=0"),
        ({"time": "soon"}, "time='soon' is not a time"),
        ({"time": "1:2:3:4"}, "is not a time"),
        ({"time": "2"}, "time=2 leaves no time to train"),
        ({"on_node_failure": "pray"}, "Choose requeue or continue"),
    ],
)
def test_what_cannot_be(change: dict[str, Any], part: str) -> None:
    with pytest.raises(SpecError, match=part):
        replace(PLAIN, **change)


@pytest.mark.parametrize("text", ["lr", "=1,2", "lr=", "lr=1,,2", "0-3", "a b=1"])
def test_an_array_of_nothing(text: str) -> None:
    with pytest.raises(SpecError, match="does not say what differs"):
        Sweep.parse(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("2:30", 150), ("2:00:00", 7200), ("1-12", 129600), ("1-00:30", 88200), ("2-1:1:1", 176461)],
)
def test_times(text: str, seconds: int) -> None:
    assert time_limit_s(text) == seconds
    assert time_limit_s("UNLIMITED") is None


def test_the_queue_is_read() -> None:
    lines = [
        "12|RUNNING|1:02|None|instep|/home/me/a|b/submit.sh",
        "13_4|PENDING|0:00|Priority|instep|/r/submit.sh",
        "14|RUNNING|0:01|None|instep|bash",
        "15|RUNNING|0:01|None|(null)|/theirs/submit.sh",
        "16_2|RUNNING|0:01|None|instep-tune|/s/submit.sh",
    ]
    jobs = parse_queue("\n".join(lines) + "\n")
    assert [job.id for job in jobs] == ["12", "13_4", "14", "15", "16_2"]
    assert [job.run_dir for job in jobs] == [Path("/home/me/a|b"), Path("/r/4"), None, None, Path("/s")]
    assert [job.state for job in jobs] == ["RUNNING", "PENDING", "RUNNING", "RUNNING", "RUNNING"]


def test_a_signal_does_not_end_the_wait(tmp_path: Path) -> None:
    """USR1 reaches the step, whose exit code counts; without progress the job is not requeued."""
    stub(tmp_path, "srun", "trap 'echo told > told' USR1", ": > up", "sleep 1 & wait; sleep 0.5", "exit 7")
    prelude = ("(until [[ -e up ]]; do sleep 0.02; done; kill -USR1 $$) &",)
    for spec, code in ((replace(PLAIN, prelude=prelude), 3), (replace(PLAIN, prelude=prelude, requeue=False), 7)):
        (tmp_path / "up").unlink(missing_ok=True)
        (tmp_path / "told").unlink(missing_ok=True)
        done = run_script(spec, tmp_path, "RUNNING/None")
        assert (tmp_path / "told").exists()
        assert done.returncode == code, done.stdout + done.stderr
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("state", "requeue", "code", "requeued"),
    [
        ("RUNNING/None", True, 0, True),
        ("COMPLETING/TimeLimit", True, 0, True),
        ("COMPLETING/None", True, 0, False),  # cancelled, or put back by SLURM
        ("RUNNING/None", False, 3, False),
        ("COMPLETING/None", False, 0, False),
    ],
)
def test_ranks_that_left_before_the_end(tmp_path: Path, state: str, requeue: bool, code: int, requeued: bool) -> None:
    stub(tmp_path, "srun", "exit 0")
    done = run_script(replace(PLAIN, requeue=requeue, run_dir=tmp_path / "run"), tmp_path, state)
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "requeued").exists() == requeued
    assert ("Submit this script again" in done.stderr) == (code == 3)


def test_only_its_own_task_of_an_array_is_requeued(tmp_path: Path) -> None:
    stub(tmp_path, "srun", "exit 0")
    spec = replace(PLAIN, run_dir=tmp_path / "run", sbatch_options=("--array=3-5",))
    run_script(spec, tmp_path, "RUNNING/None", SLURM_ARRAY_JOB_ID="40007", SLURM_ARRAY_TASK_ID="5")
    assert (tmp_path / "requeued").read_text() == "requeue 40007_5\n"


def test_a_queue_that_does_not_answer(tmp_path: Path) -> None:
    stub(tmp_path, "srun", "exit 0")
    done = run_script(replace(PLAIN, run_dir=tmp_path / "run"), tmp_path, "; exit 1")
    assert done.returncode == 3
    assert "squeue failed" in done.stderr


def test_a_result_old_and_new(tmp_path: Path) -> None:
    """An old result does not make a stopped job complete; a new one does, whatever the exit code of srun."""
    spec = replace(PLAIN, run_dir=tmp_path)
    (tmp_path / "result.json").write_text("{}")
    stub(tmp_path, "srun", "exit 0")  # the run was complete before
    assert run_script(spec, tmp_path, "RUNNING/None").returncode == 0
    assert not (tmp_path / "requeued").exists()
    stub(tmp_path, "srun", "kill -TERM $PPID; exit 0")
    run_script(spec, tmp_path, "RUNNING/None")
    assert (tmp_path / "requeued").exists()
    (tmp_path / "requeued").unlink()
    stub(tmp_path, "srun", "echo {} > new; mv new result.json; exit 1")
    assert run_script(spec, tmp_path, "RUNNING/None").returncode == 0
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("outcome", "exit_code", "code", "requeued"),
    [
        ("complete", 0, 0, False),
        ("running", 0, 0, False),  # nothing is left for this job
        ("complete", 1, 1, False),  # no trial is complete
        ("preempted", 0, 0, True),  # SLURM asked the step, and not this script
        ("", 9, 9, False),
    ],
)
def test_a_job_of_a_search(tmp_path: Path, outcome: str, exit_code: int, code: int, requeued: bool) -> None:
    """What the command printed decides; what it printed before it was requeued does not count."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "outcome-2.json").write_text('{"status": "complete"}')
    printed = f"""echo '{{"trials": [], "status": "{outcome}"}}'""" if outcome else ""
    stub(tmp_path, "srun", 'printf "%s\\0" "$@" > words', printed, f"exit {exit_code}")
    spec = replace(PLAIN, nodes=1, searchers=3, values=("lr=1..2:log",), run_dir=tmp_path, options=("--trials", "9"))
    done = run_script(spec, tmp_path, "RUNNING/None", SLURM_ARRAY_JOB_ID="40005", SLURM_ARRAY_TASK_ID="2")
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "requeued").exists() == requeued
    words = (tmp_path / "words").read_text().split("\0")
    assert words[words.index("tune") : -1] == [
        *("tune", "digits.py:Digits", "lr=1..2:log", "--trials", "9", "-n", "4"),
        *("--run-dir", str(tmp_path), "--storage", "journal", "--json"),
    ]
    assert {"--array=0-2", "--comment=instep-tune"} <= set(directives(spec))


def test_a_prelude_that_fails(tmp_path: Path) -> None:
    stub(tmp_path, "srun", ": > trained")
    done = run_script(replace(PLAIN, prelude=("true", "ls 'no such' # file", "true")), tmp_path, "RUNNING/None")
    assert done.returncode == 2
    assert "--prelude: 'ls 'no such' # file' ended with exit code 2" in done.stderr
    assert not (tmp_path / "trained").exists()


def test_preludes_as_documented(tmp_path: Path) -> None:
    """conda and modules are shell functions that a file defines; what they export reaches the training."""
    (tmp_path / "it's conda.sh").write_text(
        'conda() { [[ $1 == activate && $2 == "my env" ]] && export CONDA_ENV=$2; }\n'
    )
    (tmp_path / "modules.sh").write_text("module() { [[ $2 != none/* ]] && export LOADED=$LOADED:$2; }\n")
    stub(tmp_path, "srun", 'echo "$CONDA_ENV $LOADED" > trained')
    conda = (f'source "{tmp_path}/it\'s conda.sh"', "conda activate 'my env'")
    modules = (f"source {tmp_path}/modules.sh", "module load gcc/13", "module load cuda/12.4")
    run_script(replace(PLAIN, prelude=(*conda, *modules)), tmp_path, "RUNNING/None")
    assert (tmp_path / "trained").read_text() == "my env :gcc/13:cuda/12.4\n"
    (tmp_path / "trained").unlink()
    done = run_script(replace(PLAIN, prelude=(*modules, "module load none/1")), tmp_path, "RUNNING/None")
    assert done.returncode == 2
    assert "--prelude: 'module load none/1' ended with exit code 1, so the training was not started" in done.stderr
    assert not (tmp_path / "trained").exists()
