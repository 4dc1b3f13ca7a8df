"""Finders on real ranks: the same answer at 1 and 2 processes, memory that runs out, nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commands
import instep
from finder_tasks import Broken, Held, Hidden, Hungry, Limited, Plain, Scaled, Zero
from instep.checkpoint.weights import weights_sha256
from instep.core.errors import SpecError, TaskError
from instep.core.spec import TrainSpec
from instep.train.source import TaskSource
from instep.train.train_state import Parameters
from instep.tune.finders.batch_fit import find_largest
from instep.tune.finders.batch_search import SizeRange
from instep.tune.finders.finder import FindRequest, open_finder
from instep.tune.finders.lr_field import find_lr_field

FILE = Path(__file__).parent / "finder_tasks.py"
ENV = {"PYTHONPATH": os.pathsep.join([str(commands.ROOT / "src"), str(commands.TESTS)])}


def request(task: instep.Task, over: str = "", num_rounds: int = 2, **options: Any) -> FindRequest:
    return FindRequest(TaskSource.of_value(task), TrainSpec(**options), over, num_rounds)


def test_a_range_test_is_the_same_bits_on_two_processes(tmp_path: Path) -> None:
    """Once as a command, once from Python, where nothing of the caller's is touched."""
    (tmp_path / "t").mkdir()
    words = ("--find", "lr", "--steps", "30", "--over", "1e-4..10", "--exact", "--shards", "4", "--batch-size", "32")
    more = ("-n", "2", "--json", "-o", "lr.svg")
    done = commands.run(
        *("instep", "tune", f"{FILE}:Held", "num_samples=300", *words, *more),
        env=ENV | {"TMPDIR": str(tmp_path / "t")},
        cwd=tmp_path,
    )
    two = commands.result_of(done)
    task = Held(num_samples=300)
    before, state = weights_sha256(task.net.state_dict()), torch.get_rng_state()
    one = instep.tune(task, find="lr", steps=30, over="1e-4..10", exact=True, shards=4, batch_size=32)
    assert weights_sha256(task.net.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert one.measured["losses"] == two["losses"]
    assert one.measured["lrs"] == two["lrs"]
    assert one.suggestion == two["suggestion"]
    assert two["suggestion"] is not None
    assert 1e-4 < two["suggestion"] < 1
    command = (
        f"instep train {FILE}:Held num_samples=300 lr={two['suggestion']:g} --batch-size 32 --exact --shards 4 -n 2"
    )
    assert sorted(two["command"].split()) == sorted(command.replace("-n 2", "--nproc-per-node 2").split())
    assert two["text"] in done.stderr
    ElementTree.parse(tmp_path / "lr.svg")
    assert {path.name for path in tmp_path.iterdir()} == {"lr.svg", "t"}
    assert list((tmp_path / "t").iterdir()) == []


def fits(task: instep.Task, world_size: int, folder: Path, where: SizeRange) -> tuple[int, int | None]:
    largest = find_largest(request(task, processes=world_size), where, folder)
    return largest.rows, largest.failed_rows


def test_memory_that_runs_out_on_one_rank(tmp_path: Path) -> None:
    """All ranks agree, and none hangs."""
    assert fits(Limited(limit=11, only=1), 2, tmp_path, SizeRange(8, 16, 16, 2)) == (11, 12)


@pytest.mark.slow  # `test_memory_that_runs_out_on_one_rank` in make test
def test_memory_that_runs_out_on_all_ranks(tmp_path: Path) -> None:
    where = {size: SizeRange(1, None, 8, size) for size in (1, 2)}
    assert fits(Limited(limit=37), 1, tmp_path / "1", where[1]) == (37, 38)
    assert fits(Limited(limit=37), 2, tmp_path / "2", where[2]) == (37, 38)
    assert fits(Limited(limit=0), 1, tmp_path / "0", where[1])[0] == 0


@pytest.mark.slow  # `test_memory_that_runs_out_on_one_rank` in make test, with a planted limit
@pytest.mark.timeout(400)
def test_a_real_limit_is_found_within_five_percent(tmp_path: Path) -> None:
    """The kernel refuses memory beyond a limit that the finder does not know."""
    rows, _ = fits(Hungry(), 1, tmp_path / "a", SizeRange(1, None, 64, 1))
    assert rows > 64
    more = int(rows * 1.05) + 1
    assert fits(Hungry(), 1, tmp_path / "b", SizeRange(more, more, more, 1)) == (0, more)


def test_a_batch_whose_failure_is_not_memory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(instep.RanksFailed, match="no rows today"):
        fits(Broken(), 1, tmp_path, SizeRange(1, None, 8, 1))


@pytest.mark.slow  # the parts are in test_noise_scale.py, test_batch_search.py, test_choice.py and above
@pytest.mark.timeout(400)
def test_batch_sizes_of_one_and_two_processes() -> None:
    words = ("--find", "batch-size", "--steps", "20", "--rounds", "2", "--json")
    task = f"{FILE}:Limited"
    one, two = (
        commands.result_of(commands.run("instep", "tune", task, "limit=40", *words, "-n", size, env=ENV, timeout_s=150))
        for size in ("1", "2")
    )
    assert one["fits"]["rows"] == two["fits"]["rows"] == 40
    assert (one["fits"]["batch_size"], two["fits"]["batch_size"]) == (40, 80)
    noise = one["noise_scale"]  # on one process, blocks of 128 samples come in micro-batches
    assert two["noise_scale"] == pytest.approx(noise, rel=1e-6)
    assert noise["low"] <= noise["critical"] <= (noise["high"] or float("inf"))
    assert two["suggestion"] <= 80
    assert f"--batch-size {two['suggestion']}" in two["command"]
    assert "memory ran out on rank" not in two["text"]


@pytest.mark.slow  # choices are in test_choice.py; the launches are those of --find batch-size
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "over", "flag"),
    [("workers", "0,1", "--data-workers"), ("threads", "1,2", "--threads"), ("processes", "1,2", "--nproc-per-node")],
)
def test_settings(name: str, over: str, flag: str, tmp_path: Path) -> None:
    words = ("--find", name, "--over", over, "--rounds", "2", "--json", "-o", str(tmp_path / "s.html"))
    done = commands.run("instep", "tune", f"{FILE}:Plain", *words, env=ENV, timeout_s=100)
    result = commands.result_of(done)
    assert [each["value"] for each in result["candidates"]] == [int(word) for word in over.split(",")]
    assert all(each["mean"] > 0 and len(each["rounds"]) == 2 for each in result["candidates"])
    assert result["suggestion"] in (0, 1, 2)
    is_default = flag == "--nproc-per-node" and result["suggestion"] == 1
    assert is_default or f"{flag} {result['suggestion']}" in result["command"]
    assert "samples/s" in (tmp_path / "s.html").read_text()


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    words = ("--find", "lr", "--steps", "1000000", "--over", "1e-9..1e-8")
    process = commands.start(
        "instep", "tune", f"{FILE}:Plain", *words, env=ENV | {"TMPDIR": str(tmp_path)}, cwd=tmp_path
    )
    commands.wait_for(lambda: any(commands.steps_in(path) for path in tmp_path.glob("instep-find-*/run")))
    ranks = commands.pids_of(next(tmp_path.glob("instep-find-*/run")), 1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    commands.wait_for(lambda: not any(commands.is_alive(pid) for pid in ranks))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "over", "options", "message"),
    [
        ("lr", "1..x", {}, "is not a range of learning rates"),
        ("lr", "", {"steps": 5}, "steps=5 are too few to see a curve"),
        ("lr", "", {"batch_size": 1, "processes": 2}, "batch_size=1"),
        ("batch-size", "2..1", {}, "holds no batch sizes"),
        ("batch-size", "5..7", {"processes": 4}, "holds no batch that 4 processes share evenly"),
        ("batch-size", "", {"batch_tokens": 100}, "batch_tokens says how large a batch is"),
        ("threads", "1", {}, "leaves nothing to compare"),
        ("threads", "0,1", {}, "0 threads is too few"),
        ("processes", "1,100000", {}, "processes=100000"),
    ],
)
def test_what_is_refused(name: str, over: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        open_finder(name).check(request(Plain(), over, **options))
    assert message in str(error.value)


def test_rounds_that_measure_nothing() -> None:
    for name in ("batch-size", "workers"):
        with pytest.raises(SpecError, match="rounds=0 would measure nothing"):
            open_finder(name).check(request(Plain(), "0,1" if name == "workers" else "", num_rounds=0))


def test_a_command_that_says_too_little() -> None:
    done = commands.run("instep", "tune", f"{FILE}:Plain", "--find", "batchsize", "--json", env=ENV)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error.startswith("find='batchsize' is unknown.")
    assert error.endswith("Choose one of lr, batch-size, workers, threads, processes.")
    with pytest.raises(SpecError, match=r"instep\.tune got a type, and needs an instance"):
        instep.tune(Plain, find="lr")


@pytest.mark.parametrize(
    ("task", "field"),
    [(Plain(), "lr"), (Hidden(), None), (Scaled(), "lr_of_256"), (Plain(lr=3, num_samples=3), "lr")],
)
def test_which_field_is_the_learning_rate(task: instep.Task, field: str | None) -> None:
    params = Parameters(nn.Linear(2, 2).named_parameters())
    kept = dataclasses.asdict(task)  # type: ignore[call-overload]
    assert find_lr_field(task, type(task).optimizer, params) == field
    assert dataclasses.asdict(task) == kept  # type: ignore[call-overload]


def test_an_optimizer_without_a_learning_rate() -> None:
    params = Parameters(nn.Linear(2, 2).named_parameters())
    with pytest.raises(TaskError, match=r"SGD has lr=0.0 in its first group"):
        find_lr_field(Zero(), Zero.optimizer, params)
