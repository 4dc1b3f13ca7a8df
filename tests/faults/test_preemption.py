"""Asked to stop: all ranks save at one step and leave with exit code 0; the same command goes on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from commands import TESTS, descendants, is_alive, pids_of, result_of, run, start, steps_in, wait_for
from instep.checkpoint.rundir import RunDirectory
from instep.events.read import read_events

pytestmark = pytest.mark.timeout(120)
TASK = str(TESTS / "faults" / "slow_task.py")
OPTIONS = [
    "--epochs",
    "3",
    "--batch-size",
    "10",
    "--seed",
    "9",
    "--exact",
    "--shards",
    "5",
    "--drop-last",
    "--save-every",
    "never",
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> str:
    folder = str(tmp_path_factory.mktemp("undisturbed"))
    return result_of(run("python", TASK, *OPTIONS, "--json", "pause_s=0.05", "--run-dir", folder))["weights_sha256"]


def targets(whom: str, job: subprocess.Popen[str], run_dir: Path) -> list[int]:
    """Find whom to signal: the command, one rank, or every process, as a scheduler does that ends a job."""
    if whom == "rank 1":
        return pids_of(run_dir, 2)[1:]
    return [job.pid] if whom == "the command" else [*descendants(job.pid), job.pid]


@pytest.mark.parametrize(
    "signals",
    [
        [("rank 1", signal.SIGUSR1), ("every process", signal.SIGTERM)],
        pytest.param([("rank 1", signal.SIGTERM), ("every process", signal.SIGUSR1)], marks=pytest.mark.slow),
        pytest.param([("the command", signal.SIGTERM), ("the command", signal.SIGUSR1)], marks=pytest.mark.slow),
    ],
)
def test_preempted_and_continued(signals: list[tuple[str, signal.Signals]], tmp_path: Path, undisturbed: str) -> None:
    words = ["instep", "train", TASK, *OPTIONS, "--json", "pause_s=0.05", "--run-dir", str(tmp_path)]
    reached = 0
    for whom, number in signals:
        job = start(*words, "-n", "2")
        wait_for(lambda reached=reached: len(steps_in(tmp_path)) >= reached + 3, timeout_s=30)
        workers = pids_of(tmp_path, 2)
        for pid in targets(whom, job, tmp_path):
            os.kill(pid, number)
        out, err = job.communicate(timeout=20)
        assert job.returncode == 0, err
        result = json.loads(out.splitlines()[-1])
        assert result["status"] == "preempted"
        assert reached + 3 <= result["steps"] < 30
        assert not (tmp_path / "result.json").exists()
        assert not any(map(is_alive, workers))
        reached = result["steps"]
        assert RunDirectory(tmp_path).names()[0] == f"step-{reached:08d}"
        for rank in range(2):  # at one step, all of them
            last = [e for e in read_events(tmp_path, rank) if e["event"] == "end"][-1]
            assert (last["status"], last["step"]) == ("preempted", reached)
    done = result_of(run(*words, "-n", "3"))
    assert (done["status"], done["steps"], done["weights_sha256"]) == ("complete", 30, undisturbed)


def test_the_wish_is_heeded_that_comes_before_the_ranks_listen(tmp_path: Path) -> None:
    job = start("instep", "train", TASK, *OPTIONS, "--json", "pause_s=0.05", "--run-dir", str(tmp_path), "-n", "2")
    wait_for(lambda: any("instep:keep" in name_of(pid) for pid in descendants(job.pid)))
    os.kill(job.pid, signal.SIGTERM)
    out, err = job.communicate(timeout=20)
    assert job.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 1


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except FileNotFoundError:
        return ""


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    job = start("instep", "train", TASK, *OPTIONS, "pause_s=30", "--run-dir", str(tmp_path), "-n", "2")
    wait_for(lambda: len(pids_of(tmp_path, 2)) == 2, timeout_s=30)
    time.sleep(0.5)
    workers = pids_of(tmp_path, 2)
    os.kill(job.pid, signal.SIGTERM)
    time.sleep(1.3)
    assert job.poll() is None
    begun = time.monotonic()
    os.kill(job.pid, signal.SIGTERM)
    _, err = job.communicate(timeout=20)
    assert job.returncode == 3
    assert "ended by SIGTERM" in err
    assert time.monotonic() - begun < 12, "it would wait for the pause"
    assert not any(map(is_alive, workers))


def test_under_torchrun(tmp_path: Path, undisturbed: str) -> None:
    words = ["torchrun", "--nproc-per-node", "2", TASK, *OPTIONS, "pause_s=0.05", "--run-dir", str(tmp_path)]
    job = start(*words)
    wait_for(lambda: len(steps_in(tmp_path)) >= 3, timeout_s=40)
    os.kill(job.pid, signal.SIGTERM)
    job.communicate(timeout=30)
    assert [e["status"] for e in read_events(tmp_path) if e["event"] == "end"] == ["preempted"]
    done = result_of(run("python", TASK, *OPTIONS, "--json", "pause_s=0.05", "--run-dir", str(tmp_path)))
    assert done["weights_sha256"] == undisturbed


LOOP = """
import sys, time, torch, instep
with instep.start(seed=3, run_dir=sys.argv[1], steps=60, batch_size=8, save_every="never") as run:
    model, _ = run.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for step in run.steps(torch.arange(160.0).view(40, 4) / 160):
        for x in step.shards():
            step.backward((model(x) - 1).square().mean())
        step.finish()
        time.sleep(float(sys.argv[2]))
    print("done", run.step)
"""


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    whole = run("python", str(script), str(tmp_path / "whole"), "0")
    job = start("python", str(script), str(tmp_path / "run"), "0.05")
    wait_for(lambda: len(steps_in(tmp_path / "run")) >= 3, timeout_s=30)
    os.kill(job.pid, signal.SIGUSR1)
    out, err = job.communicate(timeout=20)
    assert (job.returncode, out) == (0, ""), err
    done = run("python", str(script), str(tmp_path / "run"), "0")
    assert done.stdout == whole.stdout == "done 60\n"
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "run")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


# The launcher passes a stop on as test_preempted_and_continued has it.
@pytest.mark.parametrize("how", [pytest.param("instep", marks=pytest.mark.slow), "python"])
def test_ctrl_c_saves_and_says_how_to_continue(how: str, tmp_path: Path, undisturbed: str) -> None:
    """Without --run-dir: the command that it prints has one, and continues the run."""
    words = ["instep", "train", TASK, "-n", "2"] if how == "instep" else ["python", TASK]
    job = start(*words, *OPTIONS, "--json", "pause_s=0.1", cwd=tmp_path)
    wait_for(lambda: any(len(steps_in(path)) >= 3 for path in tmp_path.glob("runs/*")), timeout_s=30)
    os.kill(job.pid, signal.SIGINT)
    out, err = job.communicate(timeout=20)
    assert job.returncode == 130, err
    assert "Ctrl-C: saving after this step; once more ends it at once." in err
    assert "Traceback" not in err
    result = json.loads(out.splitlines()[-1])
    assert result["status"] == "preempted"
    assert RunDirectory(tmp_path / result["run_dir"]).names()[0] == f"step-{result['steps']:08d}"
    again = next(line for line in err.splitlines() if line.startswith("To continue: ")).removeprefix("To continue: ")
    assert again.endswith(f"--run-dir {result['run_dir']}")
    done = result_of(run(*shlex.split(again), cwd=tmp_path))
    assert (done["status"], done["steps"], done["weights_sha256"]) == ("complete", 30, undisturbed)


@pytest.mark.parametrize("how", ["instep", pytest.param("python", marks=pytest.mark.slow)])
def test_a_second_ctrl_c_ends_at_once(how: str, tmp_path: Path) -> None:
    words = ["instep", "train", TASK, "-n", "2"] if how == "instep" else ["python", TASK]
    job = start(*words, *OPTIONS[:-1], "2", "pause_s=0.3", "--run-dir", str(tmp_path))
    wait_for(lambda: len(steps_in(tmp_path)) >= 3, timeout_s=30)
    workers = pids_of(tmp_path, 2 if how == "instep" else 1)
    for pid in workers[1:]:
        os.kill(pid, signal.SIGSTOP)  # so that nobody can save
    os.kill(job.pid, signal.SIGINT)
    time.sleep(1.2)
    os.kill(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=10)
    assert job.returncode == 130, err
    assert "Traceback" not in err
    if how == "instep":
        assert f"interrupted. The newest checkpoint is {tmp_path / 'checkpoints' / 'step-00000002'}." in err
    assert "To continue: " in err
    wait_for(lambda: not any(map(is_alive, workers)), timeout_s=5)


def test_ctrl_c_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    job = start("instep", "train", TASK, *OPTIONS, "-n", "2", "pause_s=30", "--run-dir", str(tmp_path))
    wait_for(lambda: len(read_events(tmp_path, 1)) >= 1, timeout_s=30)
    os.kill(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=10)
    assert job.returncode == 130, err
    assert "interrupted. Nothing was saved." in err


def test_ctrl_c_in_a_program_is_raised_after_saving(tmp_path: Path) -> None:
    """The program must not go on to its next training."""
    (program := tmp_path / "program.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(TASK).parent)!r})\n"
        "import instep, slow_task\n"
        "try:\n"
        "    instep.train(slow_task.Slow(pause_s=0.1), epochs=3, batch_size=10, save_every='never', run_dir='run')\n"
        "except KeyboardInterrupt as error:\n"
        "    print(error)\n"
    )
    job = start("python", str(program), cwd=tmp_path)
    wait_for(lambda: len(steps_in(tmp_path / "run")) >= 3, timeout_s=30)
    os.kill(job.pid, signal.SIGINT)
    out, err = job.communicate(timeout=20)
    assert job.returncode == 0, err
    assert "interrupted, and saved at step" in out.splitlines()[-1]
    assert out.splitlines()[-1].endswith("To continue: instep.train(…, run_dir='run')")
    assert len(RunDirectory(tmp_path / "run").names()) == 1
