"""Each tracker with its real library: what the library reads back is what the event log says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import BIN, wait_for
from instep.launch.tracker_process import TrackerProcess
from instep.launch.tracking import HANG_S, send_once
from tracked import EACH, HASH, MadeUpLog, complete, describe, expected, facts, read_back, rounded

CONFIGURATION = ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID")


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in CONFIGURATION:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def write_restarted_run(run_dir: Path) -> None:
    """Write the log of a run that was killed at step 33, continued from step 25, and completed."""
    describe(run_dir)
    log = MadeUpLog(run_dir)
    log.notice("one sample was left out")
    log.steps(1, 33)
    log.close()
    log = MadeUpLog(run_dir, attempt=1, first_step=25)
    log.steps(26, 50)
    log.end("complete", 50)
    log.close()
    complete(run_dir)


def send(name: str, run_dir: Path) -> TrackerProcess:
    (tracker,) = send_once(run_dir, [name], lambda _: None)
    assert tracker.is_done, tracker.error + tracker.log.read_text()
    return tracker


@pytest.mark.parametrize("name", EACH)
def test_the_numbers_read_back_are_the_event_logs(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_restarted_run(run_dir)
    tracker = send(name, run_dir)
    assert str(tmp_path) in tracker.where  # in the run directory, unless the user has configured something else
    wanted = rounded(name, expected(run_dir))
    assert read_back(name, run_dir) == wanted
    texts = facts(name, run_dir)
    for fact in (HASH, "one sample was left out", "restart 1", "options/batch_size", "Made"):
        assert fact in texts
    send(name, run_dir)  # again: there is nothing new
    assert read_back(name, run_dir) == wanted
    if name in ("csv", "tensorboard"):
        shutil.rmtree(tracker.where)
        send(name, run_dir)  # again: everything
        assert read_back(name, run_dir) == wanted
        assert {HASH, "one sample was left out"} <= {
            *re.findall(f"{HASH}|one sample was left out", facts(name, run_dir))
        }


@pytest.mark.parametrize("name", EACH)
def test_killed_at_any_moment_and_continued(name: str, tmp_path: Path) -> None:
    """The tracker's own process is killed while it sends, several times, and so is the run."""
    run_dir = tmp_path / "run"
    describe(run_dir)
    step = 0
    for attempt in range(4):
        tracker = TrackerProcess(run_dir, name, 0.2, hang_s=HANG_S)
        tracker.start()
        first = max(0, step - 3)
        log = MadeUpLog(run_dir, attempt, first)
        log.steps(first + 1, first + 12)
        log.close()
        step = first + 12
        if attempt:  # the first one is killed while it opens
            wait_for(lambda: _has_sent(tracker, step), timeout_s=60)  # noqa: B023
        log = MadeUpLog(run_dir, attempt, step)
        log.steps(step + 1, step + 5)
        log.close()
        step += 5
        time.sleep(0.1 + 0.25 * attempt)
        tracker.end()
    complete(run_dir)
    send(name, run_dir)
    numbers, wanted = read_back(name, run_dir), rounded(name, expected(run_dir))
    assert {*numbers} == {*wanted}
    if name in ("csv", "tensorboard"):
        assert numbers == wanted


def _has_sent(tracker: TrackerProcess, step: int) -> bool:
    tracker.poll()
    assert tracker.is_running, tracker.error
    return tracker.step >= step - 1  # the newest row waits for its evaluation


@pytest.mark.parametrize("name", EACH)
def test_killed_between_sending_and_noting_it(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    describe(run_dir)
    log = MadeUpLog(run_dir)
    log.steps(1, 9)
    send(name, run_dir)
    note = run_dir / "trackers" / f"{name}.json"
    before = note.read_bytes()
    log.steps(10, 15)
    send(name, run_dir)
    note.write_bytes(before)
    log.steps(16, 20)
    log.close()
    send(name, run_dir)
    assert read_back(name, run_dir) == rounded(name, expected(run_dir))


def test_a_torn_line_and_a_new_column_of_a_table(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    describe(run_dir)
    log = MadeUpLog(run_dir)
    log.steps(1, 4)  # without kl, which comes at step 6
    send("csv", run_dir)
    with (run_dir / "csv" / "steps.csv").open("a") as file:
        file.write("5,0.1,0,0.")
    log.steps(5, 20)
    log.close()
    send("csv", run_dir)
    assert read_back("csv", run_dir) == expected(run_dir)


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """Run MLflow's own server on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "a")]
    words = [str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(url), timeout_s=90)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


# MLflow's client through a database of its own: test_the_numbers_read_back_are_the_event_logs, in make test-all too.
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_server_of_mlflow(mlflow_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    run_dir = tmp_path / "run"
    write_restarted_run(run_dir)
    assert send("mlflow", run_dir).where == mlflow_server
    assert read_back("mlflow", run_dir) == expected(run_dir)
    assert "'instep.status': 'complete'" in facts("mlflow", run_dir)
    assert not (run_dir / "mlflow").exists()


# The process of csv: test_nothing_of_torch_is_imported.
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not Path("/usr/bin/strace").exists(), reason="strace is not installed")
@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "trackio", "wandb"])
def test_nothing_is_sent_or_listens_beyond_this_machine(name: str, tmp_path: Path) -> None:
    from instep.core.trackers import TRACKERS

    run_dir = tmp_path / "run"
    write_restarted_run(run_dir)
    (run_dir / "trackers").mkdir()
    words = [sys.executable, "-P", "-m", "instep.monitor.tracking.process", str(run_dir), name, TRACKERS[name].path]
    trace = ["strace", "-f", "-qq", "-e", "trace=connect,bind,sendto", "-o", str(tmp_path / "trace")]
    subprocess.run([*trace, *words, "120", "0", "1"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    calls = [line for line in (tmp_path / "trace").read_text().splitlines() if "AF_INET" in line]
    assert [line for line in calls if "127.0.0.1" not in line and '"::1"' not in line] == []


def test_nothing_of_torch_is_imported() -> None:
    program = (
        "import sys, instep.monitor.tracking.process, instep.monitor.tracking.to_csv; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-P", "-c", program], text=True) == "False\n"


def test_every_tracker_has_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    from commands import ROOT
    from instep.core.trackers import TRACKERS

    extras: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, entry in TRACKERS.items():
        if entry.package:
            assert extras[name][0].startswith(entry.package)
            assert name in extras["trackers"][0]
