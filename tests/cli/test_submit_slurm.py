"""`instep submit slurm` before it speaks to SLURM: what it writes, and what it refuses at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, TESTS, run
from instep.cli.jobs import cancel, jobs
from instep.cli.submit_kubernetes import kubernetes
from instep.cli.submit_slurm import OPTIONS, follow, plan_job, result_stamp, slurm, with_processes
from instep.core.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_SPEC, CheckpointError, EnvironmentFailed, SpecError
from instep.core.options import OptionScope, options_of
from instep.core.spec import TrainSpec
from instep.launch.slurm import client
from instep.train.source import load_file, make_task, task_class

TASK = "tests/faults/slow_task.py"
NODE = {option.name for option in options_of(TrainSpec) if option.scope is OptionScope.NODE} - {"rdzv_conf"}
REFUSED = ("run_dir", "run-dir", "processes", "json", "quiet", "fresh", *sorted(NODE))


DEFAULTS = {option.name: option.default for option in OPTIONS}


def slow(*values: str) -> Any:
    path = TESTS / "faults" / "slow_task.py"
    return make_task(task_class(load_file(path), path), values)


def plan(spec: TrainSpec, *values: str, sbatch: tuple[str, ...] = (), **asked: Any) -> Any:
    return plan_job(slow(*values), TASK, list(values), spec, DEFAULTS | asked, sbatch)


def exit_code(command: Any, *words: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        command.main(list(words))
    return ended.value.code


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that writes a stand-in for a program of SLURM."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "_RETRY_PAUSE_S", 0.05)
    monkeypatch.setattr(client, "_RETRY_FOR_S", 1.0)

    def put(name: str, *lines: str) -> None:
        (folder / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
        (folder / name).chmod(0o755)

    return put


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
    assert with_processes({"processes": None}, 4) == {"processes": 4}
    assert with_processes({"processes": None}, None) == {"processes": 1}
    assert with_processes({"processes": "1"}, 4) == {"processes": "1"}
    job = plan(TrainSpec(processes=2, data_workers=3), gpus_per_node=4)
    assert (job.processes, job.cpus_per_node) == (2, 8)
    assert plan(TrainSpec(processes=2, threads=8)).cpus_per_node == 16
    assert plan(TrainSpec(processes=2), array="threads=2,4").cpus_per_node == 8
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
        (TrainSpec(processes=8), {"array": "batch-size=16,4"}, "batch_size=4"),
        (TrainSpec(mesh="fsdp=4"), {"nodes": 4, "on_node_failure": "continue"}, "1 process"),
        (TrainSpec(exact=True, shards=4), {"nodes": 8, "on_node_failure": "continue"}, "fewer than the 8 ranks"),
        *((TrainSpec(), {"array": f"{name}=1,2"}, "neither a field") for name in REFUSED),
        (TrainSpec(), {"array": "exact=perhaps"}, "not a bool"),
        (TrainSpec(), {"array": "compile=true,none"}, "needs a value"),
        (TrainSpec(), {"array": "seed=1,2", "sbatch": ("--array=0-3",)}, "--array=0-3 after -- and instep's --array"),
        (TrainSpec(), {"time": "20", "sbatch": ("-t", "30")}, "instep's --time"),
        (TrainSpec(), {"array": "pause_s=1,soon"}, "pause_s='soon'"),
        (TrainSpec(), {"array": "batch-size=8,0"}, "batch_size=0"),
        (TrainSpec(), {"on_node_failure": "wait"}, "Choose requeue or continue"),
    ],
)
def test_refused_before_the_queue(spec: TrainSpec, asked: dict[str, Any], part: str) -> None:
    with pytest.raises(SpecError, match=part):
        plan(spec, **asked)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--nodes=3"], "instep's --nodes"),
        (["-N", "3"], "instep's --nodes"),
        (["-N3"], "instep's --nodes"),
        (["--mem=1G", "-n", "4"], "-n says how many"),
        (["--ntasks=4"], "-n says how many"),
        (["--ntasks-per-node", "4"], "-n says how many"),
        (["--ntasks-per-gpu=1"], "-n says how many"),
        (["-c4"], "--cpus-per-node"),
        (["--gpus-per-node=2"], "--gpus-per-node"),
        (["--signal=USR1@10"], "--signal-before"),
        (["-o", "x"], "logs/"),
        (["--outp=x"], "logs/"),
        (["--error=x"], "logs/"),
        (["-D", "/"], "change to that directory"),
        (["--no-requeue"], "instep's --requeue"),
        (["--comment=mine"], "instep jobs recognizes"),
    ],
)
def test_refused_after_the_dashes(words: list[str], part: str) -> None:
    with pytest.raises(SpecError, match=part):
        plan(TrainSpec(), nodes=2, sbatch=tuple(words))


def test_left_to_sbatch() -> None:
    words = ("--job-name=x", "--gpus=4", "--gres=gpu:1", "--nodelist=a", "--time-min=3", "-J", "y", "-A", "me", "-t9")
    assert plan(TrainSpec(), sbatch=words).sbatch_options == words
    assert plan(TrainSpec(), sbatch=("--array=3-5",)).is_array


def test_what_says_where_is_not_asked_for() -> None:
    assert {"nnodes", "hosts", "on", "preempted_exit"} < NODE
    for command in (slurm, kubernetes):
        assert not {parameter.name for parameter in command.params} & NODE
    spec = TrainSpec(rdzv_conf="last_call_timeout=2", lost_after="20s")
    assert plan(spec).options == ("--rdzv-conf", "last_call_timeout=2", "--lost-after", "20s")
    done = run("instep", "submit", "slurm", TASK, "--on", "ray", "--dry-run")
    assert done.returncode == 2
    assert "No such option: --on" in done.stderr


def test_what_help_says() -> None:
    text = " ".join(run("instep", "submit", "slurm", "--help", env={"COLUMNS": "400"}).stdout.split())
    assert "processes on each node (as many as GPUs, or 1)" in text
    assert "print job_id, run_dir and script" in text
    assert "on this machine" not in text
    assert "print the Result" not in text


def test_what_an_array_sweeps() -> None:
    assert plan(TrainSpec(), array="compile=true,false").sweep.words == ("--compile", "--no-compile")
    assert plan(TrainSpec(), array="batch-size=8,16").sweep.words == ("--batch-size=8", "--batch-size=16")
    assert plan(TrainSpec(), array="pause_s=1,2").sweep.words == ("pause_s=1", "pause_s=2")


def test_the_run_that_lives_there(tmp_path: Path) -> None:
    """A run of another recipe is refused before the queue, one of the same is not, and nothing is touched."""
    words = ["tests/faults/slow_task.py", "pause_s=0", "--steps", "2", "--seed", "1", "--quiet"]
    assert run("python", *words, "--run-dir", str(tmp_path / "run")).returncode == 0
    shutil.copytree(tmp_path / "run", tmp_path / "runs" / "1")
    files = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    spec = TrainSpec(seed=1, steps=2, run_dir=str(tmp_path / "run"))
    several = TrainSpec(seed=1, steps=2, run_dir=str(tmp_path / "runs"))
    plan(spec, "pause_s=0")
    plan(several, "pause_s=0", array="seed=3,1")
    with pytest.raises(CheckpointError, match="precision: 'fp32' there, 'bf16' now"):
        plan(TrainSpec(seed=1, steps=2, run_dir=spec.run_dir, precision="bf16"), "pause_s=0")
    with pytest.raises(CheckpointError, match="seed: 1 there, 3 now"):
        plan(TrainSpec(seed=3, steps=2, run_dir=spec.run_dir), "pause_s=0")
    plan(TrainSpec(seed=3, steps=2, run_dir=spec.run_dir, fresh=True), "pause_s=0")
    with pytest.raises(CheckpointError, match="seed: 1 there, 3 now"):
        plan(several, "pause_s=0", array="seed=1,3")
    with pytest.raises(CheckpointError, match=r"pause_s: 0\.0 there, 2\.0 now"):
        plan(several, "pause_s=2", sbatch=("--array=0-1",))
    assert files == sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("array", [None, "seed=1,2"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_refused_job_leaves_all_as_it_was(
    tmp_path: Path, programs: Any, array: str | None, fresh: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    programs("sbatch", "echo 'sbatch: error: invalid partition specified: nope' >&2", "exit 1")
    for folder in (tmp_path / "run", tmp_path / "run" / "0", tmp_path / "run" / "0.old-1"):
        folder.mkdir()
        (folder / "spec.json").write_text("{}")
        (folder / "logs").mkdir()
    (tmp_path / "run" / "submit.sh").write_text("the one before")
    files = {path: path.read_text() if path.is_file() else "" for path in (tmp_path / "run").rglob("*[!k]")}
    words = ["--fresh"] * fresh + (["--array", array] if array else [])
    assert exit_code(slurm, str(ROOT / TASK), "--run-dir", "run", *words) == EXIT_SPEC
    assert "nope" in capsys.readouterr().err
    actual = {path: path.read_text() if path.is_file() else "" for path in (tmp_path / "run").rglob("*[!k]")}
    assert actual == files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["programs", "run"]


HICCUP = "slurm_load_jobs error: Zero Bytes were transmitted or received"
GONE = "slurm_load_jobs error: Invalid job id specified"


@pytest.mark.parametrize("told", [HICCUP, "slurm_load_jobs error: Unable to contact slurm controller", "who knows"])
def test_a_hiccup_is_not_the_end_of_a_job(programs: Any, told: str) -> None:
    programs("squeue", f"echo '{told}' >&2", "exit 1")
    programs("scontrol", f"echo '{told}' >&2", "exit 1")
    for ask in (client.find_job, client.exit_code_of):
        with pytest.raises(EnvironmentFailed, match=told):
            ask("7")
    programs("squeue", f"echo '{GONE}' >&2", "exit 1")
    assert client.find_job("7") is None
    with pytest.raises(SpecError, match="Invalid job id"):
        client.running_jobs(["7"])


def hiccups(*after: str) -> list[str]:
    """Return a squeue that answers once, fails three times, then does what is given."""
    job = "echo '7|RUNNING|0:01|None|instep|/x/submit.sh'"
    lines = ["count=$(cat count 2>/dev/null || echo 0); echo $((count + 1)) > count"]
    return [
        *lines,
        f"[[ $count -gt 0 ]] || {{ {job}; exit; }}",
        f"[[ $count -gt 3 ]] || {{ echo '{HICCUP}' >&2; exit 1; }}",
        *after,
    ]


def test_cancel_asks_again(programs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    programs("scancel", "[[ -e tried ]] || { : > tried; echo 'Unable to contact slurm controller' >&2; exit 1; }")
    programs("squeue", *hiccups(f"echo '{GONE}' >&2", "exit 1"))
    assert exit_code(cancel, "7") == EXIT_DONE
    told = capsys.readouterr().err
    assert told.count("retrying in") == 4
    assert "job 7 is cancelled" in told
    programs("squeue", *hiccups(f"echo '{HICCUP}' >&2", "exit 1"))
    Path("count").unlink()
    assert exit_code(cancel, "7") == EXIT_ENVIRONMENT
    told = capsys.readouterr().err
    assert "Zero Bytes" in told
    assert "is cancelled" not in told


def test_follow_asks_again_and_minds_only_a_new_result(
    tmp_path: Path, programs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text("{}")
    before = result_stamp(tmp_path)
    programs("scontrol", "echo 'JobId=7 JobState=FAILED ExitCode=1:0'")
    programs("squeue", *hiccups("echo '7|FAILED|0:09|None|instep|/x/submit.sh'"))
    assert follow("7", tmp_path, before) == 1
    told = capsys.readouterr().err
    assert told.count("retrying in") == 3
    assert "job 7 is failed, and the training is not complete" in told
    assert follow("7", tmp_path, None) == 0  # there was none before
    programs("squeue", "echo '7|COMPLETED|0:09|None|instep|/x/submit.sh'")
    assert follow("7", tmp_path, before) == 0  # it was complete, and the job found so


def test_jobs_of_others_are_not_listed(programs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    programs(
        "squeue", "echo '7|RUNNING|0:01|None|instep|/x/submit.sh'", "echo '8|RUNNING|0:01|None|(null)|/y/submit.sh'"
    )
    assert exit_code(jobs, "--json") == EXIT_DONE
    assert [row["job_id"] for row in json.loads(capsys.readouterr().out)["jobs"]] == ["7"]
