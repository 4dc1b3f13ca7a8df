"""`instep explain`: the verdict as text and as JSON, what is no run refused, damage named."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import commands
from instep.cli.try_advice import try_advice
from instep.core.errors import EnvironmentFailed, SpecError
from instep.events.read import path_of
from instep.events.schema import PhasesRecord
from instep.events.write import EventLog
from instep.monitor.bottleneck.verdict import explain_run, open_log


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for rank, data_s in enumerate((0.1, 1.5)):
        log = EventLog(tmp_path, rank)
        phases = {"data": data_s, "forward": 1.0, "communication": 1.5 - data_s}
        for number in range(1, 5):
            log.write(
                PhasesRecord(step=8 * number, num_steps=8, num_samples=64, seconds=sum(phases.values()), phases=phases)
            )
        log.close()
    (tmp_path / "spec.json").write_text(json.dumps({"spec": {"data_workers": 0}}))
    return tmp_path


def test_the_verdict_as_json_and_as_text(run_dir: Path) -> None:
    done = commands.run("instep", "explain", str(run_dir), "--json")
    verdict = commands.result_of(done)
    assert (verdict["bounded_by"], verdict["rank"]) == ("input", 1)
    assert verdict["share"] == pytest.approx(0.6)
    assert verdict["advice"][0]["options"] == "--data-workers 2"
    assert verdict["text"] in done.stderr
    assert verdict["ranks"] == {"0": pytest.approx(0.4), "1": pytest.approx(6.0)}
    text = commands.run("instep", "explain", str(run_dir))
    assert text.stdout.strip() == verdict["text"]
    assert text.stderr == ""


def test_damage_is_named_and_what_is_no_run_is_refused(run_dir: Path) -> None:
    with path_of(run_dir, 1).open("a") as file:
        file.write("half a li\n")
    done = commands.run("instep", "explain", str(run_dir))
    assert done.returncode == 0
    assert done.stdout.startswith("Input bounded the speed")
    assert f"{path_of(run_dir, 1)}: line 5 left out" in done.stderr
    refused = commands.run("instep", "explain", str(run_dir / "events"), "--json")
    assert refused.returncode == 2
    assert "is not a run" in json.loads(refused.stdout.splitlines()[-1])["error"]


def test_what_cannot_be_tried_is_refused(run_dir: Path) -> None:
    verdict = explain_run(open_log(run_dir))
    with pytest.raises(SpecError, match="cannot be read, so the run cannot be trained again"):
        try_advice(run_dir, verdict, print)
    spec = {"nnodes": "1", "on": "here"}
    (run_dir / "spec.json").write_text(json.dumps({"task": {"name": "T", "fields": {}}, "spec": spec}))
    with pytest.raises(SpecError, match="no file that defines it"):
        try_advice(run_dir, verdict, print)
    (run_dir / "spec.json").write_text(
        json.dumps({"task": {"name": "T", "file": __file__}, "spec": spec | {"nnodes": "2"}})
    )
    with pytest.raises(SpecError, match="ran on several nodes"):
        try_advice(run_dir, verdict, print)
    (run_dir / "spec.json").write_text(json.dumps({"task": {"name": "T", "file": __file__}, "spec": {}}))
    with pytest.raises(SpecError, match="cannot be read, so the run cannot be trained again"):
        try_advice(run_dir, verdict, print)
    assert try_advice(run_dir, replace(verdict, advice=()), print) is None


def test_a_trial_neither_profiles_nor_tracks(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: dict[str, Any] = {}

    def fail(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        tried.update(json.loads(Path(words[words.index("--config") + 1]).read_text())["spec"])
        return subprocess.CompletedProcess(words, 1, "", "no")

    monkeypatch.setattr(subprocess, "run", fail)
    spec = {"nnodes": "1", "on": "here", "batch_size": 64, "profile": "auto", "track": "csv", "epochs": 3}
    (run_dir / "spec.json").write_text(json.dumps({"task": {"name": "T", "file": __file__}, "spec": spec}))
    with pytest.raises(EnvironmentFailed, match="a trial has failed"):
        try_advice(run_dir, explain_run(open_log(run_dir)), print)
    assert (tried["profile"], tried["track"], tried["epochs"]) == (None, None, None)


def test_a_run_with_nothing_to_try_is_no_error(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    log.write(PhasesRecord(step=8, num_steps=8, num_samples=64, seconds=1.0, phases={"forward": 1.0}))
    log.close()
    done = commands.run("instep", "explain", str(tmp_path), "--try", "--json")
    assert done.returncode == 0
    verdict = commands.result_of(done)
    assert (verdict["bounded_by"], verdict["rank"], verdict["advice"]) == ("nothing", None, [])
    assert verdict["tried"] is None
    assert "Nothing was tried" in done.stderr
