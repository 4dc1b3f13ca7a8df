"""Trials that are promoted: paused at a rung, continued from their checkpoint on another number of processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

import commands
from instep.events.read import read_events

DIGITS = str(commands.ROOT / "examples" / "digits.py")
WORDS = (
    *("lr=1e-4..1e-1:log", "hidden=16,32", "--metric", "accuracy:max", "--trials", "5", "--pruner", "asha:eta=2"),
    *("--rung-processes", "1,2", "--epochs", "4", "--exact", "--quiet", "--json"),
)

# test_promotion.py has the decisions, faults/test_kill_and_resume.py a training that is continued
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_winner_has_the_weights_of_a_straight_training(tmp_path: Path) -> None:
    words = ("instep", "tune", DIGITS, *WORDS, "--run-dir", str(tmp_path / "search"))
    killed = commands.start(*words)
    commands.wait_for(lambda: (tmp_path / "search" / "trials" / "0002" / "spec.json").exists(), timeout_s=60)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    searched = commands.result_of(commands.run(*words, timeout_s=120))
    undisturbed = commands.result_of(commands.run(*words[:-1], str(tmp_path / "undisturbed"), timeout_s=120))
    for trial, other in zip(searched["trials"], undisturbed["trials"], strict=True):
        assert {trial["state"], other["state"]} <= {"complete", "pruned"}
        for key in ("params", "state", "values", "num_evaluations", "sentence"):
            assert trial[key] == other[key], f"trial {trial['number']}: {key}"
    best = Path(searched["best"]["run_dir"])
    sizes = [event["world_size"] for event in read_events(best) if event["event"] == "start"]
    assert sizes[0] == 1
    assert sizes[-1] == 2, "it was not continued on two processes"
    again = (*shlex.split(searched["command"]), "--run-dir", str(tmp_path / "straight"), "--json")
    straight = commands.result_of(commands.run(*again))
    assert straight["weights_sha256"] == json.loads((best / "result.json").read_text())["weights_sha256"]
