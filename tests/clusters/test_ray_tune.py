"""A search whose trials a real Ray places: the study is that of a search on one machine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import TESTS, is_alive, pids_of, result_of, run, steps_in, wait_for
from instep.events.read import read_events
from ray_cluster import PORT, RayCluster, ray_home
from rings import require

TASK = f"{TESTS / 'tune' / 'tunable.py'}:Paced"
WORDS = ("lr=1e-3..1:log", "hidden=4,16", "--trials", "3", "--metric", "accuracy:max", "--sampler", "random")
HOW = ("--epochs", "3", "--batch-size", "16", "--exact", "--json", "--run-dir")
ON_RAY = ("--on", "ray", "--address", "auto", "--parallel", "auto")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class UnevenCluster(RayCluster):
    """Two nodes: one with two CPUs and what Ray takes for a GPU, one with a CPU."""

    def start_nodes(self) -> None:
        """Start the head, then the other node."""
        self._ray("--head", "--port", str(PORT), "--include-dashboard=false", "--num-cpus", "2", "--num-gpus", "1")
        self._ray("--address", self.address)


@pytest.fixture(scope="module")
def uneven_nodes() -> Iterator[RayCluster]:
    require("Ray nodes")
    with ray_home(UnevenCluster) as cluster:
        assert isinstance(cluster, UnevenCluster)
        cluster.start_nodes()
        yield cluster


def compared(outcome: dict[str, Any]) -> list[Any]:
    names = ("number", "state", "params", "values", "num_evaluations", "sentence", "copied_from")
    return [{name: trial[name] for name in names} for trial in outcome["trials"]]


def running_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("trials/*") if len(steps_in(path)) > 1 and not (path / "result.json").exists()]


def test_a_population_on_ray_is_killed_and_ends_as_on_one_machine(uneven_nodes: RayCluster, tmp_path: Path) -> None:
    """On all CPUs of the cluster; the search is killed, and the same command continues it."""
    words = ("instep", "tune", TASK, *WORDS, "--pruner", "pbt", *HOW)
    here = result_of(run(*words, str(tmp_path / "here"), "pause_s=0", timeout_s=200))
    folder = tmp_path / "ray"
    placed = (*words, str(folder), "pause_s=0", *ON_RAY, "--gpus-per-trial", "0")
    process = uneven_nodes.start(*placed)
    wait_for(lambda: process.poll() is not None or len(running_in(folder)) > 0, timeout_s=200)
    assert process.poll() is None, process.communicate()
    pids = [pid for trial in running_in(folder) for pid in pids_of(trial, 1)]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    wait_for(lambda: not any(map(is_alive, pids)))  # Ray ends the tasks of a driver that is gone, keepers the ranks
    outcome = result_of(uneven_nodes.run(*placed, timeout_s=300))
    assert outcome["at_once"] == 3
    assert compared(outcome) == compared(here)
    assert {trial["state"] for trial in outcome["trials"]} == {"complete", "pruned"}
    assert any(trial["copied_from"] for trial in outcome["trials"])
    assert weights_in(folder, len(here["trials"])) == weights_in(tmp_path / "here", len(here["trials"]))
    assert (folder / "report.html").exists()


def weights_in(folder: Path, num_trials: int) -> list[str | None]:
    results = [folder / f"trials/{number:04d}" / "result.json" for number in range(num_trials)]
    return [json.loads(path.read_text())["weights_sha256"] if path.exists() else None for path in results]


def test_promotion_on_ray_and_a_stop(uneven_nodes: RayCluster, tmp_path: Path) -> None:
    """ASHA; asked to leave, the trials save, and the same command continues."""
    folder = tmp_path / "s"
    words = ("instep", "tune", TASK, *WORDS, "--pruner", "asha:eta=2", *HOW, str(folder), "pause_s=0.2")
    placed = (*words, *ON_RAY, "--gpus-per-trial", "0")
    process = uneven_nodes.start(*placed)
    wait_for(lambda: process.poll() is not None or len(running_in(folder)) > 1, timeout_s=200)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert '"status": "preempted"' in out
    assert any(folder.glob("trials/*/checkpoints/step-*"))
    outcome = result_of(uneven_nodes.run(*placed, timeout_s=300))
    assert outcome["status"] == "complete"
    assert [trial["number"] for trial in outcome["trials"]] == [0, 1, 2]
    assert outcome["best"] is not None


def test_a_lost_process_of_ray_is_replaced(uneven_nodes: RayCluster, tmp_path: Path) -> None:
    """Ray starts the task again, and the trial continues from its checkpoint."""
    folder = tmp_path / "s"
    how = ("--trials", "1", "--steps", "40", "--save-every", "4", "--metric", "accuracy:max", "--batch-size", "8")
    words = ("instep", "tune", TASK, "lr=0.01..0.1", *how, "pause_s=0.1", "--run-dir", str(folder), "--json")
    process = uneven_nodes.start(*words, *ON_RAY, "--gpus-per-trial", "0")
    trial = folder / "trials" / "0000"
    wait_for(lambda: process.poll() is not None or len(steps_in(trial)) > 10, timeout_s=200)
    (task,) = (pid for pid in uneven_nodes.inside.pids() if "_outcome_of" in title_of(pid))
    os.kill(task, signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["trials"][0]["state"] == "complete", out
    events = list(read_events(trial))
    again = max(index for index, event in enumerate(events) if event["event"] == "start")
    assert next(event["step"] for event in events[again:] if event["event"] == "step") > 4


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has just ended
        return ""


def test_two_trials_share_a_gpu(uneven_nodes: RayCluster, tmp_path: Path) -> None:
    words = ("instep", "tune", TASK, *WORDS, *HOW, str(tmp_path / "s"), "pause_s=0", *ON_RAY, "--trials", "2")
    outcome = result_of(uneven_nodes.run(*words, "--gpus-per-trial", "0.5", timeout_s=300))
    assert outcome["at_once"] == 2
    assert [trial["state"] for trial in outcome["trials"]] == ["complete"] * 2


def test_what_no_node_has(uneven_nodes: RayCluster, tmp_path: Path) -> None:
    words = ("instep", "tune", TASK, *WORDS, *HOW, str(tmp_path / "s"), "-n", "3", *ON_RAY)
    done = uneven_nodes.run(*words, timeout_s=100)
    assert done.returncode == 2, done.stderr
    assert "a trial needs 3 CPUs and 3 GPUs, and no node of the Ray cluster has as much" in done.stderr
