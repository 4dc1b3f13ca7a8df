"""`instep scale`: a real measurement, what is refused, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import commands
from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.scale.pieces import ScalePlan

TASK = f"{commands.TESTS / 'tasks.py'}:Small"


def test_a_measurement(tmp_path: Path) -> None:
    figure, env = tmp_path / "s.svg", {"TMPDIR": str(tmp_path / "t")}
    (tmp_path / "t").mkdir()
    words = ("--worlds", "2,1", "--steps", "40", "--rounds", "2", "--batch-size", "8", "--weak", "-o", str(figure))
    done = commands.run("instep", "scale", TASK, *words, "--json", env=env, cwd=tmp_path)
    outcome = commands.result_of(done)
    assert outcome["mode"] == "weak"
    one, two = outcome["sizes"]
    assert [(size["world_size"], size["batch_size"]) for size in (one, two)] == [(1, 8), (2, 16)]
    assert one["efficiency"]["mean"] == 1
    assert two["samples_per_s"]["mean"] > 0
    assert two["efficiency"]["low"] <= two["efficiency"]["mean"] <= two["efficiency"]["high"]
    assert sum(two["lost_to"].values()) == pytest.approx(1 - two["efficiency"]["mean"], abs=1e-9)
    assert outcome["text"] in " ".join(done.stderr.split("\n"))
    assert "round 2/2  2 processes, 40 steps" in done.stderr
    ElementTree.parse(figure)
    assert {path.name for path in tmp_path.iterdir()} == {"s.svg", "t"}
    assert list((tmp_path / "t").iterdir()) == []


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    words = ("--worlds", "1,2", "--steps", "1000000")
    process = commands.start("instep", "scale", TASK, *words, env={"TMPDIR": str(tmp_path)}, cwd=tmp_path)
    commands.wait_for(lambda: any(commands.steps_in(path) for path in tmp_path.glob("instep-scale-*/*")))
    ranks = commands.pids_of(next(tmp_path.glob("instep-scale-*/*")), 1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    commands.wait_for(lambda: not any(commands.is_alive(pid) for pid in ranks))
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused() -> None:
    done = commands.run("instep", "scale", TASK, "--worlds", "1,x", "--json")
    assert done.returncode == 2
    assert "worlds='1,x' is not a list of numbers" in json.loads(done.stdout)["error"]
    done = commands.run("instep", "scale", TASK, "-o", "s.pdf")
    assert done.returncode == 2
    assert "output=s.pdf is neither a page (.html) nor a figure (.svg, .png)" in done.stderr
    done = commands.run("instep", "scale", TASK, "-o", "/nowhere/s.svg")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("cannot be written: there is no directory /nowhere. Give another file with -o.")
    assert "round" not in done.stderr  # before anything is measured


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ScalePlan((1,), 1, None, False), "worlds=1 must be two or more different numbers"),
        (ScalePlan((1, 1), 1, None, False), "worlds=1,1 must be two or more"),
        (ScalePlan((0, 1), 1, None, False), "worlds=0,1 must be"),
        (ScalePlan((1, 2), 0, None, False), "rounds=0 would measure nothing"),
        (ScalePlan((1, 2), 1, 5, False), "steps=5 is too small"),
        (ScalePlan((1, 16), 1, None, False), "batch_size=10"),
        (ScalePlan((4, 5), 1, None, True), "a fraction of a sample. Use a multiple of 4"),
    ],
)
def test_a_plan_that_cannot_be_measured(plan: ScalePlan, message: str) -> None:
    with pytest.raises(SpecError) as error:
        plan.check(TrainSpec(batch_size=10))
    assert message in str(error.value)


def test_the_batch_grows_with_the_world() -> None:
    assert ScalePlan((2, 4, 6), 1, None, True).batch_sizes(TrainSpec(batch_size=10)) == {2: 10, 4: 20, 6: 30}
    assert ScalePlan((2, 4), 1, None, False).batch_sizes(TrainSpec(batch_size=10)) == {2: 10, 4: 10}
