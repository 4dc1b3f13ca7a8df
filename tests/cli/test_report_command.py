"""`instep report`: a real run's numbers in every format, where the file goes, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import commands
from instep.events.read import read_events

Command = Callable[..., tuple[int, str, str]]
TASK = commands.TESTS / "tasks.py"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes."""
    path = tmp_path_factory.mktemp("runs") / "small"
    words = (
        "train",
        f"{TASK}:Small",
        "lr=0.01",
        "-n",
        "2",
        "--steps",
        "12",
        "--batch-size",
        "8",
        "--run-dir",
        str(path),
    )
    done = commands.run("instep", *words, "--json", "--quiet")
    commands.result_of(done)
    return path


def test_the_numbers_are_the_run_s(run_dir: Path, command: Command, tmp_path: Path) -> None:
    result = json.loads((run_dir / "result.json").read_text())
    code, out, _ = command("report", str(run_dir), "-o", "-", "--format", "json")
    (facts,) = json.loads(out)["runs"]
    assert code == 0
    assert (facts["status"], facts["steps"], facts["world_sizes"]) == ("complete", 12, [2])
    assert (facts["loss"], facts["metrics"]) == (result["loss"], result["metrics"])
    assert facts["weights_sha256"] == result["weights_sha256"]
    losses = [event["loss"] for event in read_events(run_dir) if event["event"] == "step"]
    assert facts["curves"]["loss"]["mean"] == losses
    assert [rank["rank"] for rank in facts["phases"]] == [0, 1]
    for rank in facts["phases"]:
        assert sum(rank["phases"].values()) == pytest.approx(rank["seconds"], rel=0.02)
    assert facts["surroundings"]["code_sha256"].keys() == {"tasks.py"}
    assert f"instep train {TASK}:Small lr=0.01 num_samples=43 --nproc-per-node 2" in facts["recipe"]["command"]

    page = tmp_path / "r.html"
    code, out, err = command("report", str(run_dir), "-o", str(page), "--json")
    assert (code, json.loads(out)["file"], json.loads(out)["bytes"]) == (0, str(page), page.stat().st_size)
    assert str(page) in err
    assert result["weights_sha256"] in page.read_text()
    code, out, _ = command("report", str(run_dir), "-o", "-", "--format", "markdown")
    assert out.startswith("# Small\n")
    assert result["weights_sha256"] in out


def test_the_command_to_train_it_again_trains_the_same(run_dir: Path, command: Command, tmp_path: Path) -> None:
    _, out, _ = command("report", str(run_dir), "-o", "-", "--format", "json")
    words = json.loads(out)["runs"][0]["recipe"]["command"].split()
    again = commands.result_of(commands.run(*words, "--json", "--quiet", "--run-dir", str(tmp_path / "again")))
    assert again["weights_sha256"] == json.loads((run_dir / "result.json").read_text())["weights_sha256"]


def test_where_the_file_goes(run_dir: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("report", str(run_dir))[0] == 0
    assert command("report", str(run_dir), "-o", "a.md")[0] == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "a.md").read_text().startswith("# Small")
    (tmp_path / "a.md").write_text("old")
    assert command("report", str(run_dir), "-o", "a.md")[0] == 0
    assert (tmp_path / "a.md").read_text().startswith("# Small")
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "a.md"}


def test_what_is_refused(run_dir: Path, command: Command, tmp_path: Path) -> None:
    code, out, err = command("report", str(tmp_path / "none"), "--json")
    assert (code, json.loads(out)["exit_code"]) == (2, 2)
    assert "does not exist" in err
    assert "is not a run" in command("report", str(run_dir), str(tmp_path))[2]
    code, _, err = command("report", str(run_dir), "-o", str(tmp_path / "no" / "r.html"))
    assert code == 2
    assert f"cannot be written: there is no directory {tmp_path / 'no'}" in err
    code, _, err = command("report", str(run_dir), "-o", str(tmp_path / "r.pdf"))
    assert code == 2
    assert "ends in .pdf, which is no format of a report" in err
    assert "both want standard output" in command("report", str(run_dir), "-o", "-", "--json")[2]
    assert command("report")[0] == 2
    assert command("report", str(run_dir), "--format", "pdf")[0] == 2


def test_a_run_that_is_given_twice_is_one(run_dir: Path, command: Command) -> None:
    again = f"{run_dir.parent}/../{run_dir.parent.name}/{run_dir.name}"
    code, out, _ = command("report", str(run_dir), again, str(run_dir), "-o", "-", "--format", "json")
    assert code == 0
    assert len(json.loads(out)["runs"]) == 1
