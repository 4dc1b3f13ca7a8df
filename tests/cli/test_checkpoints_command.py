"""`instep checkpoints`, on the checkpoints of a real run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import instep
from commands import ROOT, run, start, wait_for
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import weights_sha256
from instep.monitor import reading
from tasks import Small

Command = Callable[..., tuple[int, str, str]]
STEPS = [10, 8, 6, 4, 2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> tuple[Path, instep.Result]:
    path = tmp_path_factory.mktemp("trained") / "run"
    options = {"batch_size": 10, "threads": 1, "quiet": True, "epochs": 2, "save_every": "2", "keep": 9}
    return path, instep.train(Small(), run_dir=str(path), **options)


@pytest.fixture
def run_dir(trained: tuple[Path, instep.Result], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


def file_of(run_dir: Path, step: int, name: str = "model.safetensors") -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}" / name


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def told(answer: tuple[int, str, str], code: int = 0) -> dict[str, Any]:
    """Read the one line of JSON."""
    assert answer[0] == code, answer[2]
    (line,) = answer[1].splitlines()
    actual = json.loads(line)
    assert actual["ok"] is (code == 0)
    return actual


def refused(answer: tuple[int, str, str], *parts: str) -> None:
    code, out, err = answer
    assert code == 2, err
    assert "Traceback" not in err
    assert out == ""
    for part in parts:
        assert part in err, f"{part!r} is not in {err!r}"


class TestList:
    def test_of_a_run(self, command: Command, run_dir: Path) -> None:
        code, out, _ = command("checkpoints", str(run_dir))
        lines = out.splitlines()
        assert code == 0
        assert [line.split()[0] for line in lines[1:-1]] == [f"step-{step:08d}" for step in STEPS]
        assert all("  sizes agree" in line for line in lines[1:-1])
        assert ["  accuracy 0." in line for line in lines[1:-1]] == [True, False, False, False, False]
        assert lines[-1] == "5 with the right sizes; --verify also compares hashes."

    def test_the_best(self, command: Command, tmp_path: Path) -> None:
        options = {"batch_size": 10, "threads": 1, "quiet": True, "epochs": 3, "save_every": "5", "keep": 9}
        result = instep.train(Small(), run_dir=str(tmp_path / "run"), keep_best="eval_loss:min", **options)
        code, out, _ = command("checkpoints", str(tmp_path / "run"))
        assert code == 0
        marked = [line.split()[0] for line in out.splitlines() if line.endswith("  best")]
        assert result.best is not None
        assert marked == [result.best.name]
        assert out.splitlines()[-1] == f"Best by --keep-best eval_loss:min: {result.best.name}."
        entries = told(command("checkpoints", str(tmp_path / "run"), "--json"))["checkpoints"]
        best = min(entries, key=lambda entry: entry["metrics"]["eval_loss"])
        assert [entry["name"] for entry in entries if entry["best"]] == [best["name"]] == [result.best.name]

    def test_as_json(self, command: Command, run_dir: Path) -> None:
        answer = command("checkpoints", str(run_dir), "--json")
        actual = told(answer)
        assert [each["step"] for each in actual["checkpoints"]] == STEPS
        assert actual["checkpoints"][0]["num_files"] == len(list(file_of(run_dir, 10).parent.iterdir()))
        assert "sizes agree" in answer[2]

    def test_names_what_was_set_aside_or_half_written(self, command: Command, run_dir: Path) -> None:
        file_of(run_dir, 10).parent.rename(run_dir / "checkpoints" / "damaged-step-00000010")
        file_of(run_dir, 8).parent.rename(run_dir / "checkpoints" / ".step-00000008.99")
        code, out, _ = command("checkpoints", str(run_dir))
        assert code == 0
        assert "set aside as damaged" in out
        assert "half-written, or being written now" in out

    def test_of_a_run_that_has_none_yet(self, command: Command, tmp_path: Path) -> None:
        (tmp_path / "spec.json").write_text("{}")
        code, out, _ = command("checkpoints", str(tmp_path))
        assert (code, out) == (0, f"{tmp_path} has no checkpoints yet.\n")

    def test_needs_no_torch(self, run_dir: Path) -> None:
        program = (
            "import sys; from instep.cli.app import app\n"
            "try: app(['checkpoints', sys.argv[1], '--verify'])\n"
            "finally: assert 'torch' not in sys.modules"
        )
        done = run("python", "-c", program, str(run_dir))
        assert done.returncode == 0, done.stderr
        assert "5 good" in done.stdout


class TestVerify:
    def test_a_good_run(self, command: Command, run_dir: Path) -> None:
        code, out, err = command("checkpoints", str(run_dir), "--verify")
        assert (code, err) == (0, "")  # quick: no progress is shown
        assert "5 good: every file has the size and hash" in out

    def test_a_single_checkpoint(self, command: Command, run_dir: Path) -> None:
        path = str(file_of(run_dir, 8).parent)
        assert [each["state"] for each in told(command("checkpoints", path, "--verify", "--json"))["checkpoints"]] == [
            "good"
        ]
        flip(file_of(run_dir, 8))
        actual = told(command("checkpoints", path, "--verify", "--json"), code=1)
        assert actual["checkpoints"][0]["problems"][0]["file"] == "model.safetensors"

    def test_every_damaged_file_is_named(self, command: Command, run_dir: Path) -> None:
        flip(file_of(run_dir, 10))
        file_of(run_dir, 8, "optimizer.safetensors").write_bytes(b"short")
        file_of(run_dir, 8, "rng.safetensors").unlink()
        file_of(run_dir, 6, "manifest.json").write_bytes(b"")
        actual = told(command("checkpoints", str(run_dir), "--verify", "--json"), code=1)["checkpoints"]
        assert [[problem["file"] for problem in each["problems"]] for each in actual] == [
            ["model.safetensors"],
            ["optimizer.safetensors", "rng.safetensors"],
            ["manifest.json"],
            [],
            [],
        ]
        code, out, _ = command("checkpoints", str(run_dir), "--verify")
        assert code == 1
        for line in ("optimizer.safetensors: 5 bytes, and ", "rng.safetensors: missing", "manifest.json: empty"):
            assert line in out
        assert out.splitlines()[-1] == "3 damaged, 2 good."

    def test_a_manifest_cannot_lead_out_of_the_checkpoint(self, command: Command, run_dir: Path) -> None:
        secret = run_dir / "x"
        secret.write_text("secret")
        path = file_of(run_dir, 10, "manifest.json")
        manifest = json.loads(path.read_text())
        manifest["files"]["../../x"] = manifest["files"]["state.json"]
        path.write_text(json.dumps(manifest))
        for options in (["--verify"], ["--export", str(run_dir / "out"), "--step", "10"]):
            report = told(command("checkpoints", str(run_dir), *options, "--json"), code=1)
            (problem,) = (report.get("skipped") or report["checkpoints"])[0]["problems"]
            assert problem == {"file": "manifest.json", "text": "file name '../../x'"}
        assert told(command("checkpoints", str(run_dir), "--prune", "1", "--damaged", "--json"))["kept"] == [
            "step-00000008"
        ]
        assert secret.read_text() == "secret"

    def test_progress_is_told_when_it_takes_long(self, command: Command, run_dir: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(reading, "PATIENCE_S", 0.0)
        code, out, err = command("checkpoints", str(run_dir), "--verify", "--json")
        assert code == 0
        assert err.startswith("verifying: ")
        assert json.loads(out)["verified"] is True


class TestPrune:
    def test_keeps_the_newest_good_ones(self, command: Command, run_dir: Path) -> None:
        flip(file_of(run_dir, 10))
        dry = told(command("checkpoints", str(run_dir), "--prune", "2", "--dry-run", "--json"))
        assert len(RunDirectory(run_dir).names()) == 5
        code, out, _ = command("checkpoints", str(run_dir), "--prune", "2")
        assert code == 0
        assert "deleted step-00000002" in out
        assert "step-00000010 is damaged: not deleted; --damaged deletes it." in out
        assert RunDirectory(run_dir).names() == ["step-00000010", "step-00000008", "step-00000006"]
        assert dry["deleted"] == ["step-00000004", "step-00000002"]
        assert dry["kept"] == ["step-00000008", "step-00000006"]

    def test_clears_damaged_ones_away_if_asked(self, command: Command, run_dir: Path) -> None:
        flip(file_of(run_dir, 10))
        (run_dir / "checkpoints" / ".step-00000012.5").mkdir()
        shutil.copytree(file_of(run_dir, 8).parent, run_dir / "checkpoints" / "damaged-step-00000008")
        actual = told(command("checkpoints", str(run_dir), "--prune", "1", "--damaged", "--json"))
        assert actual["kept"] == ["step-00000008"]
        assert [each.name for each in (run_dir / "checkpoints").iterdir()] == ["step-00000008"]

    def test_deletes_nothing_where_none_is_good(self, command: Command, run_dir: Path) -> None:
        for step in STEPS:
            flip(file_of(run_dir, step))
        code, out, _ = command("checkpoints", str(run_dir), "--prune", "1", "--damaged")
        assert code == 1
        assert "has no good checkpoint, so nothing is deleted" in out
        assert len(RunDirectory(run_dir).names()) == 5

    def test_a_pruned_run_goes_on(self, command: Command, run_dir: Path, trained: tuple[Path, instep.Result]) -> None:
        (run_dir / "result.json").unlink()
        for step in (10, 8, 6):
            shutil.rmtree(file_of(run_dir, step).parent)
        told(command("checkpoints", str(run_dir), "--prune", "1", "--json"))
        options = {"batch_size": 10, "threads": 1, "quiet": True, "epochs": 2}
        assert instep.train(Small(), run_dir=str(run_dir), **options).weights_sha256 == trained[1].weights_sha256

    def test_is_refused_while_a_training_goes_on(self, tmp_path: Path, command: Command) -> None:
        path = tmp_path / "run"
        words = ["--epochs", "100000", "--save-every", "5", "--keep", "3", "--quiet"]
        training = start("python", str(ROOT / "examples" / "digits.py"), "--run-dir", str(path), *words)
        try:
            wait_for(lambda: len(RunDirectory(path).names()) >= 3)
            refused(command("checkpoints", str(path), "--prune", "1"), "is in use by process", "Wait until")
            for _ in range(5):  # old ones vanish and new ones come while they are read
                told(command("checkpoints", str(path), "--verify", "--json"))
                told(command("checkpoints", str(path), "--prune", "1", "--dry-run", "--json"))
        finally:
            os.killpg(training.pid, signal.SIGKILL)
            training.communicate()


class TestExport:
    def test_loads_back_bit_for_bit(
        self, command: Command, run_dir: Path, tmp_path: Path, trained: tuple[Path, instep.Result]
    ) -> None:
        actual = told(command("checkpoints", str(run_dir), "--export", str(tmp_path / "out"), "--json"))
        assert actual["step"] == 10
        model = Small().model()
        model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
        assert weights_sha256(model.state_dict()) == trained[1].weights_sha256 == actual["weights_sha256"]

    def test_of_averaged_weights(self, command: Command, run_dir: Path, tmp_path: Path) -> None:
        averaged, target = tmp_path / "averaged", tmp_path / "out.safetensors"
        result = instep.train(Small(), steps=4, batch_size=10, ema=0.9, run_dir=str(averaged), quiet=True)
        actual = told(command("checkpoints", str(averaged), "--export", str(target), "--ema", "--json"))
        expected = weights_sha256(result.load_model(ema=True).state_dict())
        assert actual["weights_sha256"] == expected == weights_sha256(load_file(target))
        assert expected != result.weights_sha256
        words = ("checkpoints", str(run_dir), "--export", str(tmp_path / "none"), "--ema")
        refused(command(*words), "holds no averaged weights", "without --ema")

    def test_in_shards(self, command: Command, run_dir: Path, tmp_path: Path) -> None:
        target = tmp_path / "out"
        actual = told(command("checkpoints", str(run_dir), "--export", str(target), "--max-shard", "0.3KB", "--json"))
        assert len(actual["files"]) > 2
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == actual["num_bytes"]
        state = {name: load_file(target / file)[name] for name, file in index["weight_map"].items()}
        assert weights_sha256(state) == actual["weights_sha256"]

    def test_starts_another_run(self, command: Command, run_dir: Path, tmp_path: Path) -> None:
        target = tmp_path / "weights.safetensors"
        assert command("checkpoints", str(run_dir), "--export", str(target), "--step", "4")[0] == 0
        options = {"batch_size": 10, "threads": 1, "quiet": True, "steps": 1, "init_from": str(target)}
        assert instep.train(Small(), run_dir=str(tmp_path / "next"), **options).steps == 1

    def test_falls_back_to_an_older_one_and_says_so(self, command: Command, run_dir: Path, tmp_path: Path) -> None:
        flip(file_of(run_dir, 10, "optimizer.safetensors"))
        code, out, _ = command("checkpoints", str(run_dir), "--export", str(tmp_path / "out"))
        assert code == 0
        assert "step-00000010 is damaged: optimizer.safetensors" in out
        assert "The older step-00000008 is exported instead." in out

    def test_of_a_damaged_step_is_not_another(self, command: Command, run_dir: Path, tmp_path: Path) -> None:
        flip(file_of(run_dir, 10))
        words = ("checkpoints", str(run_dir), "--export", str(tmp_path / "out"), "--step", "10")
        code, out, _ = command(*words)
        assert code == 1
        assert "Nothing was exported." in out
        assert told(command(*words, "--json"), code=1)["files"] == []
        assert told(command("checkpoints", *words[1:], "--json"), code=1)["skipped"][0]["step"] == 10
        assert not (tmp_path / "out").exists()

    def test_never_writes_over(self, command: Command, run_dir: Path, tmp_path: Path) -> None:
        target = tmp_path / "w.safetensors"
        target.write_text("mine")
        words = ("checkpoints", str(run_dir), "--export", str(target))
        refused(command(*words), "w.safetensors already exists", "--force")
        assert target.read_text() == "mine"
        assert command(*words, "--force")[0] == 0
        Small().model().load_state_dict(load_file(target))

    def test_never_into_the_checkpoints(self, command: Command, run_dir: Path) -> None:
        target = str(file_of(run_dir, 6).parent)
        refused(command("checkpoints", str(run_dir), "--export", target, "--force"), "inside a run's checkpoints")
        told(command("checkpoints", str(run_dir), "--verify", "--json"))


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            (["--prune", "0"], ["--prune 0 would leave no checkpoint"]),
            (["--prune", "1", "--verify"], ["--verify and --prune cannot be combined"]),
            (["--damaged"], ["--damaged is for --prune, which is not given"]),
            (["--dry-run", "--verify"], ["--dry-run is for --prune"]),
            (["--step", "3"], ["--step is for --export, which is not given"]),
            (["--export", "OUT", "--step", "3"], ["no checkpoint of step 3", "It has: 10, 8, 6, 4, 2"]),
            (["--export", "OUT", "--max-shard", "many"], ["max-shard='many' is not a size", "5GB"]),
            (["--export", "OUT.safetensors", "--max-shard", "1GB"], ["asks for one file"]),
            (["--export", "hf"], ["--export hf is a format and needs --out FOLDER", "./hf"]),
            (["--export", "onnx", "--out", "OUT"], ["--export onnx is not a format", "weights, hf, peft"]),
            (["--export", "hf", "--out", "OUT.safetensors"], ["writes a folder"]),
            (["--export", "hf", "--out", "OUT", "--files", "nowhere"], ["--files nowhere is not a folder"]),
            (["--export", "weights", "--out", "OUT", "--files", "."], ["is for --export hf and --export peft"]),
            (["--export", "peft", "--out", "OUT", "--max-shard", "1GB"], ["asks for one file"]),
            (["--export", "hf", "--out", "OUT"], ["config.json does not exist", "--files FOLDER"]),
            (["--out", "OUT"], ["--out is for --export, which is not given"]),
            (["--prune", "few"], ["'--prune'"]),
        ],
    )
    def test_is_refused(self, words: list[str], parts: list[str], command: Command, run_dir: Path) -> None:
        refused(command("checkpoints", str(run_dir), *(w.replace("OUT", str(run_dir / "o")) for w in words)), *parts)
        assert len(RunDirectory(run_dir).names()) == 5

    def test_of_what_is_no_run(self, command: Command, run_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        refused(command("checkpoints", str(tmp_path / "empty")), "is not a run", "Give the directory of a run")
        refused(command("checkpoints", str(tmp_path / "nowhere")), "is not there")
        refused(command("checkpoints", str(tmp_path)), "It contains runs, though: run.")
        refused(command("checkpoints", str(file_of(run_dir, 4).parent), "--prune", "1"), "is a single checkpoint")
        shutil.rmtree(run_dir / "checkpoints")
        refused(command("checkpoints", str(run_dir), "--export", str(tmp_path / "o")), "has no checkpoint yet")
