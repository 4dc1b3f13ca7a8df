"""Jobs that hang: the right rank and line, in one sentence, soon; and nothing is left running.

Most are launched from this process, which saves the start of a command; one training and one script are commands.
"""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path

import pytest

from commands import TESTS, result_of, run, start, wait_for
from instep.cli.conduct import conduct
from instep.core.errors import RanksFailed
from instep.core.launch_spec import LaunchSpec
from instep.core.spec import TrainSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan
from instep.launch.script import run_script
from instep.train.source import load_file, make_task, task_class

pytestmark = pytest.mark.timeout(120)
TASK, SCRIPT = TESTS / "faults" / "hanging_task.py", TESTS / "faults" / "hanging_script.py"
HANG_AFTER_S = 2


def line(file: Path, comment: str) -> str:
    """Return `file.py:12`, the line that ends with a comment."""
    for number, text in enumerate(file.read_text().splitlines(), 1):
        if text.endswith(f"# {comment}"):
            return f"{file.name}:{number}"
    raise AssertionError(comment)


def left_in(session: int) -> list[str]:
    """List the ranks' processes, and what they forked, that still run in a session."""
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        state, _, _, its_session = rest.split()[:4]
        if int(its_session) == session and state not in "ZX" and "(instep:" in name:
            names.append(name)
    return names


def check(verdict: str, logs: Path, session: int) -> tuple[str, str]:
    """Check that the verdict came soon and nothing is left; give it, and the rank that said that it would hang."""
    ended = time.time()
    wait_for(lambda: not left_in(session), timeout_s=3)
    said = {path: re.findall(r"^hangs at ([\d.]+)$", path.read_text(), re.M) for path in logs.glob("rank-*.log")}
    path, times = max(said.items(), key=lambda item: item[1])
    assert ended - float(times[-1]) < HANG_AFTER_S + 10  # on a busy machine
    print(f"{ended - float(times[-1]):.1f} s: {verdict}")
    rank = re.search(r"\d+", path.name)
    assert rank is not None
    return verdict.removeprefix("hung: "), rank[0]


def hang_training(folder: Path, how: str, **options: object) -> tuple[str, str]:
    task = make_task(task_class(load_file(TASK), TASK, ""), [f"how={how}"])
    spec = {"batch_size": 12, "epochs": 1, "max_restarts": 0, "quiet": True, "run_dir": str(folder), "processes": 2}
    with pytest.raises(RanksFailed) as failed:
        conduct(task, TrainSpec(**spec | {"hang_after": f"{HANG_AFTER_S}s"} | options), TASK, supervised=True)
    assert failed.value.first.exit_code == 3
    return check(str(failed.value), folder / "logs", os.getsid(0))


def hang_script(folder: Path, how: str, backend: str) -> tuple[str, str]:
    spec = LaunchSpec(processes=2, hang_after=f"{HANG_AFTER_S}s")
    args = (str(SCRIPT), [how, backend], False)
    with pytest.raises(RanksFailed) as failed:
        launch(LaunchJob(run_script, args, spec, LogPlan(folder), stdout=io.StringIO(), stderr=io.StringIO()))
    assert failed.value.first.exit_code == 3
    return check(str(failed.value), folder, os.getsid(0))


def test_a_dataset_that_blocks(tmp_path: Path) -> None:
    verdict, rank = hang_training(tmp_path, "read", processes=3, comm="gloo", data_workers=0)
    others = ", ".join(str(r) for r in range(3) if str(r) != rank)
    where = f"rank {rank} is in {line(TASK, 'blocks here')} __getitem__ (blocked "
    assert verdict.startswith(where), verdict
    assert re.search(rf"in read\(\)\); ranks {others} wait for it in all_(reduce|gather) of step \d+$", verdict), (
        verdict
    )
    log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    assert verdict in log
    assert f"where rank {rank} hung:" in log


def test_a_data_worker_that_deadlocks(tmp_path: Path) -> None:
    verdict, rank = hang_training(tmp_path, "lock", data_workers=1)
    worker = rf"rank {rank} waits for its data worker \(process \d+\), which is in "
    assert re.match(worker + re.escape(line(TASK, "deadlocks here")) + r" __getitem__ \(blocked \d s", verdict), verdict
    assert re.search(rf"rank {1 - int(rank)} waits for it in all_(reduce|gather) of step", verdict), verdict


@pytest.mark.parametrize("comm", ["shared-memory", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped(comm: str, tmp_path: Path) -> None:
    verdict, _ = hang_training(tmp_path, "stop", comm=comm)
    assert verdict == "rank 1 is stopped (SIGSTOP) in step 4; rank 0 waits for it in all_reduce of step 4"


def test_another_collective(tmp_path: Path) -> None:
    verdict, _ = hang_training(tmp_path, "recv")
    assert verdict == (
        f"rank 1 is in recv of step 4 ({line(TASK, 'another collective')} loss); "
        "rank 0 waits for it in all_reduce of step 4"
    )


def test_a_rank_that_computes_for_ever(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verdict, _ = hang_training(tmp_path, "compute", hang_after="1s")
    where = rf"rank 1 has been computing in {re.escape(line(TASK, 'computes here'))} loss for "
    assert re.fullmatch(where + r"\d+ s; a step takes [\de.-]+ s; rank 0 waits", verdict), verdict
    said = re.findall(r"waiting: (.*?)\. It is ended after 6 s \(--hang-after\)\.", capfd.readouterr().err)
    assert said, "it was named before it was ended"
    assert all(re.fullmatch(where + r"\d+ s; a step takes [\de.-]+ s; rank 0 waits", text) for text in said), said


def test_a_collective_of_ones_own_on_one_rank(tmp_path: Path) -> None:
    task = make_task(task_class(load_file(TASK), TASK, ""), ["how=barrier"])
    spec = TrainSpec(batch_size=12, epochs=1, max_restarts=0, quiet=True, run_dir=str(tmp_path), processes=3)
    with pytest.raises(RanksFailed) as failed:
        conduct(task, spec, TASK, supervised=True)
    own = line(TASK, "one's own")
    assert str(failed.value) == (
        f"rank 1 called barrier at {own} loss, while ranks 0, 2 called all_reduce. "
        "All ranks must call the same collectives in the same order."
    )
    assert failed.value.first.exit_code == 1


@pytest.mark.slow  # a training with one is above
def test_a_script_with_a_rank_that_is_stopped(tmp_path: Path) -> None:
    verdict, _ = hang_script(tmp_path, "stop", "instep")
    assert verdict == (
        "rank 1 is stopped (SIGSTOP) in step 7; "
        f"rank 0 waits for it in backward of step 7 ({line(SCRIPT, 'the reduction')} main)"
    )


@pytest.mark.slow  # test_the_command has it
def test_a_script_whose_rank_leaves_the_loop(tmp_path: Path) -> None:
    verdict, _ = hang_script(tmp_path, "leave", "instep")
    assert verdict.startswith(f"rank 1 is in {line(SCRIPT, 'left the loop')} left (blocked "), verdict
    assert verdict.endswith(f"rank 0 waits for it in backward of step 7 ({line(SCRIPT, 'the reduction')} main)")


def test_a_script_whose_rank_does_not_come(tmp_path: Path) -> None:
    verdict, _ = hang_script(tmp_path, "late", "instep")
    assert verdict.endswith(f"rank 0 waits for it in all_reduce of step 7 ({line(SCRIPT, 'adds up')} main)")


def test_a_script_with_two_collectives(tmp_path: Path) -> None:
    verdict, _ = hang_script(tmp_path, "barrier", "gloo")
    assert verdict == (
        f"rank 1 is in barrier of step 7 ({line(SCRIPT, 'another collective')} main); "
        f"rank 0 waits for it in backward of step 7 ({line(SCRIPT, 'the reduction')} main)"
    )


@pytest.mark.slow  # a training with one is above
def test_a_script_with_a_data_worker_that_deadlocks(tmp_path: Path) -> None:
    verdict, _ = hang_script(tmp_path, "lock", "gloo")
    assert verdict.startswith(f"rank 1 waits at {line(SCRIPT, 'waits for data')} main for its data worker"), verdict
    assert f"which is in {line(SCRIPT, 'deadlocks here')} __getitem__ (blocked" in verdict


def test_a_script_whose_ranks_all_wait(tmp_path: Path) -> None:
    verdict, _ = hang_script(tmp_path, "together", "gloo")
    assert verdict.startswith(f"both ranks 0, 1 wait in recv of step 11 ({line(SCRIPT, 'nobody sends')} main): ")


def test_one_rank_at_work_is_no_hang(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    spec = LaunchSpec(processes=2, hang_after="1s")
    args = (str(SCRIPT), ["evaluate", "gloo"], False)
    launch(LaunchJob(run_script, args, spec, LogPlan(tmp_path), stdout=out, stderr=err))
    assert sorted(out.getvalue().splitlines()) == ["[rank0] done 0", "[rank1] done 1"]


def test_the_command(tmp_path: Path) -> None:
    words = ("-n", "2", "--hang-after", f"{HANG_AFTER_S}s", "--log-dir", str(tmp_path))
    job = start("instep", "run", *words, str(SCRIPT), "leave", "gloo")
    _, err = job.communicate(timeout=45)
    assert job.returncode == 3, err
    verdicts = [text for text in err.splitlines() if text.startswith("hung: ")]
    assert len(verdicts) == 1, err
    verdict, _ = check(verdicts[0], tmp_path, job.pid)
    assert verdict.startswith(f"rank 1 is in {line(SCRIPT, 'left the loop')} left (blocked "), verdict


def test_a_hang_that_does_not_come_again_is_restarted(tmp_path: Path) -> None:
    words = ("--batch-size", "12", "--epochs", "1", "-n", "2", "--hang-after", "2s", "--run-dir", str(tmp_path))
    done = run("instep", "train", str(TASK), "how=read", *words, "--json", "--quiet")
    assert result_of(done)["restarts"] == 1
    assert "restart 1 of 3 after hung: rank" in done.stderr
    assert f"is in {line(TASK, 'blocks here')} __getitem__ (blocked" in done.stderr
