"""Signals in a command's first moments, before torch is imported: the wish is kept, also where they would be lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import BIN, TESTS, descendants, run, start, steps_in, wait_for
from instep.core.stop import SIGNALS, StopRequest, keep_stops, taking_over
from rings import unless

TASK = str(TESTS / "faults" / "slow_task.py")
OPTIONS = ("--steps", "400", "--batch-size", "12", "pause_s=0.05", "--save-every", "never", "--json")


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and see that it and its processes are gone afterwards."""
    process = start(*words, fresh=True)
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid] if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def catches(pid: int, *numbers: int) -> bool:
    """Return whether a process has handlers for signals."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)
    return all(caught >> (number - 1) & 1 for number in numbers)


def wait_for_the_first_moment(pid: int, *numbers: int) -> None:
    """Wait until a command heeds signals, and see that this is before it has torch."""
    wait_for(lambda: catches(pid, *numbers))
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def preempted(job: subprocess.Popen[str], run_dir: Path, code: int = 0) -> None:
    """See that a job ends as one that was asked to stop."""
    out, err = job.communicate(timeout=50)
    assert job.returncode == code, err
    result = json.loads(out.splitlines()[-1])
    assert (result["status"], result["steps"]) == ("preempted", 1)
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_instep_train(tmp_path: Path, number: signal.Signals) -> None:
    with started("instep", "train", TASK, *OPTIONS, "-n", "2", "--run-dir", str(tmp_path)) as job:
        wait_for_the_first_moment(job.pid, *SIGNALS)
        os.kill(job.pid, number)
        preempted(job, tmp_path)


@unless("namespaces")
def test_the_first_process_of_a_pod(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    assert unshare, "unshare is not on the path. Install util-linux."
    words = (str(BIN / "instep"), "train", TASK, *OPTIONS, "--run-dir", str(tmp_path), "--preempted-exit", "143")
    with started(unshare, "--pid", "--fork", "--kill-child", "--mount-proc", *words) as job:
        wait_for(lambda: descendants(job.pid))
        first = descendants(job.pid)[0]
        wait_for_the_first_moment(first, *SIGNALS)
        os.kill(first, signal.SIGTERM)
        preempted(job, tmp_path, 143)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_task_of_its_own(tmp_path: Path, processes: str) -> None:
    run_dir = tmp_path / "run"
    with started("python", TASK, *OPTIONS, "-n", processes, "--run-dir", str(run_dir)) as job:
        wait_for(lambda: catches(job.pid, *SIGNALS), timeout_s=30)
        assert not run_dir.exists()  # long before a rank listens
        os.kill(job.pid, signal.SIGUSR1)
        preempted(job, run_dir)


def test_a_second_one_ends(tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    with started("instep", "train", str(slow)) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "importing\n"
        os.kill(job.pid, signal.SIGTERM)
        time.sleep(1.3)
        assert job.poll() is None
        os.kill(job.pid, signal.SIGTERM)
        _, err = job.communicate(timeout=10)
        assert job.returncode == 3
        assert "ended by SIGTERM" in err
        assert "Traceback" not in err


@pytest.mark.parametrize(("command", "number", "code"), [("train", signal.SIGINT, 130), ("run", signal.SIGTERM, 3)])
def test_what_ends_at_once(tmp_path: Path, command: str, number: signal.Signals, code: int) -> None:
    (script := tmp_path / "script.py").write_text("import time\ntime.sleep(60)\n")
    with started("instep", command, str(script)) as job:
        wait_for_the_first_moment(job.pid, signal.SIGTERM)
        os.kill(job.pid, number)
        _, err = job.communicate(timeout=10)
        assert job.returncode == code, err
        assert "Traceback" not in err
    assert steps_in(tmp_path) == []


IN_A_CALLBACK = """
import signal, weakref
from instep.cli.early import end_by_every_interrupt, end_by_sigterm
class Imported: pass
def callback(_):
    signal.raise_signal({number})
    pass  # the handler runs here, where Python ignores what it raises
end_by_sigterm()
end_by_every_interrupt()
imported = Imported()
reference = weakref.ref(imported, callback)
del imported
print("runs on")
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 3)])
def test_where_python_ignores_exceptions(number: signal.Signals, code: int) -> None:
    done = run("python", "-c", IN_A_CALLBACK.format(number=int(number)))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr


ALONE = """
import os, pathlib, sys, time
sys.path.insert(0, {folder!r})
from slow_task import Slow
import instep
waits, failed = pathlib.Path({waits!r}), pathlib.Path({failed!r})
if os.environ["RANK"] == "1":
    while not waits.exists():
        time.sleep(0.05)
    time.sleep(3)
    failed.touch()
    raise SystemExit(1)
waits.touch()
instep.main(Slow)
"""


def test_a_rank_of_torchrun_does_not_wait_for_one_that_has_failed(tmp_path: Path) -> None:
    waits, failed, script = tmp_path / "waits", tmp_path / "failed", tmp_path / "alone.py"
    script.write_text(ALONE.format(folder=str(Path(TASK).parent), waits=str(waits), failed=str(failed)))
    with started("torchrun", "--nproc-per-node", "2", "--master-port", "29687", str(script)) as job:
        _, err = job.communicate(timeout=55)
        assert job.returncode == 1, err
        assert time.time() - failed.stat().st_mtime < 15  # torchrun kills after 30


class TestTakingOver:
    def test_a_wish_is_kept_and_handed_on_once_somebody_listens(self) -> None:
        ended: list[int] = []
        undo = keep_stops(ended.append)
        try:
            assert not StopRequest().asked
            with taking_over(lambda: heard.append("late")):
                heard: list[str] = []
                os.kill(os.getpid(), signal.SIGUSR1)
                assert heard == ["late"]
            os.kill(os.getpid(), signal.SIGTERM)  # an echo: nobody is told, nothing ends
            assert (heard, ended) == (["late"], [])
            assert StopRequest().asked
            with taking_over(lambda: heard.append("kept")):
                assert heard == ["late", "kept"]
        finally:
            undo()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        assert not StopRequest().asked
