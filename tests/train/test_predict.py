"""`instep.evaluate`, `instep.predict`: a checkpoint's answer for every sample once, in order, on any world size."""

from __future__ import annotations

import csv
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError, DataError, RanksFailed, SpecError, TaskError
from instep.events.read import read_events
from instep.train import restored
from instep.train.checkpoint_job import CheckpointJob, evaluate_rank, predict_rank
from instep.train.directory import plain_value
from instep.train.predictions.columns import Column
from instep.train.predictions.output import PredictionOutput
from instep.train.predictions.parts import Parts
from instep.train.trained_run import TrainedRun, value_of
from instep.world.world import World
from predict_tasks import Named, Plain, Remembers, Shade, Summed, TwoSets, numbers, two_samples
from ranks import run_ranks

ENDINGS = ("parquet", "npz", "jsonl", "csv")
SPEC: dict[str, Any] = {"epochs": 2, "batch_size": 16, "threads": 1, "quiet": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run_dir(folder: Path) -> Path:
    """A run in exact mode whose evaluation is best in its first epoch."""
    task = Named(widths=[5, 4], shade=Shade.LIGHT, where=Path("a b"))
    instep.train(task, exact=True, keep_best="eval_loss:max", run_dir=str(folder / "exact"), **SPEC)
    return folder / "exact"


def on_ranks(world: World, jobs: list[CheckpointJob]) -> list[Any]:
    """Predict and evaluate as one rank."""
    answers: list[Any] = []
    for job in jobs:
        task, _ = TrainedRun.open(Path(job.run_dir)).task()
        answers.append((evaluate_rank(world, task, job)["metrics"], predict_rank(world, task, job)))
    return answers


def at(world_size: int, outputs: list[PredictionOutput], jobs: list[CheckpointJob]) -> list[dict[str, float]]:
    """Evaluate jobs on so many ranks, and write their predictions; return the metrics."""
    by_rank = run_ranks(on_ranks, world_size, jobs)
    for number, output in enumerate(outputs):
        predicted = by_rank[0][number][1]
        columns = [Column.from_json(fields) for fields in predicted["columns"]]
        output.complete(Parts(output.parts, columns, predicted["num_parts"], predicted["num_chunks"]), lambda _: None)
    assert all(rank == by_rank[0] for rank in by_rank)
    return [metrics for metrics, _ in by_rank[0]]


def job_of(run_dir: Path, output: PredictionOutput, scratch: Path, **more: Any) -> CheckpointJob:
    spec = replace(TrainedRun.open(run_dir).spec, **more.pop("options", {}))
    job = CheckpointJob(spec=spec, run_dir=str(run_dir), checkpoint=None, data="eval", scratch=str(scratch))
    return replace(job, parts=str(output.parts), allows_ragged=output.format.allows_ragged, **more)


def test_the_same_bits_on_any_number_of_ranks(run_dir: Path, tmp_path: Path) -> None:
    """For a set whose size is divisible by nothing, and for one with fewer rows than ranks."""
    tiny = f"{Path(two_samples.__code__.co_filename)}:two_samples"
    trained = RunDirectory(run_dir).result()
    assert trained is not None
    files, metrics = {}, {}
    for world_size in (1, 2, 3):
        outputs = [PredictionOutput(tmp_path / f"{world_size}-{name}") for name in ("eval.npz", "tiny.npz")]
        with outputs[0].open(), outputs[1].open():
            jobs = [job_of(run_dir, outputs[0], tmp_path), job_of(run_dir, outputs[1], tmp_path, data=tiny)]
            metrics[world_size] = at(world_size, outputs, jobs)
        files[world_size] = [output.path.read_bytes() for output in outputs]
        assert not list(tmp_path.glob(".*"))
    assert files[1] == files[2] == files[3]
    assert metrics[1] == metrics[2] == metrics[3]
    assert metrics[1][0] == trained["metrics"]
    x, y = numbers(23, 2)
    model = instep.load_model(Named(widths=[5, 4]), run_dir)
    with torch.no_grad():
        scores = model(x)
    table = numpy.load(tmp_path / "3-eval.npz")
    assert table["index"].tolist() == list(range(23))
    assert table["label"].tolist() == scores.argmax(1).tolist()
    assert table["scores"].shape == (23, 2, 2)
    numpy.testing.assert_allclose(table["scores"].reshape(23, 4), scores.numpy(), rtol=1e-5)
    assert table["name"].tolist() == [f"klass {int(label)} é" for label in y]
    assert len(numpy.load(tmp_path / "3-tiny.npz")["index"]) == 2


@pytest.mark.parametrize("mesh", ["fsdp=2", "tp=2", "pp=2"])
def test_distributed_models_predict_what_one_process_does(mesh: str, folder: Path, tmp_path: Path) -> None:
    run_dir = folder / "rounded"
    if not run_dir.exists():
        instep.train(Plain(), run_dir=str(run_dir), **SPEC)
    alone = instep.predict(run_dir, tmp_path / "alone.npz", quiet=True)
    assert alone.columns == ["prediction"]
    assert alone.num_samples == 23
    output = PredictionOutput(tmp_path / "several.npz")
    with output.open():
        job = job_of(run_dir, output, tmp_path, options={"mesh": mesh})
        (metrics,) = at(int(mesh[-1]), [output], [job])
    expected, actual = numpy.load(tmp_path / "alone.npz"), numpy.load(tmp_path / "several.npz")
    assert actual["index"].tolist() == list(range(23))
    numpy.testing.assert_allclose(actual["prediction"], expected["prediction"], rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(instep.evaluate(run_dir, quiet=True).metrics, rel=1e-5)


def test_every_kind_of_file_has_the_same_rows(run_dir: Path, tmp_path: Path) -> None:
    for ending in ENDINGS:
        result = instep.predict(run_dir, tmp_path / f"all.{ending}", quiet=True)
        assert result.columns == ["label", "scores", "half", "sure", "name"]
    with numpy.load(tmp_path / "all.npz") as archive:
        rows = {name: archive[name].tolist() for name in archive}
    assert pyarrow.parquet.read_table(tmp_path / "all.parquet").to_pydict() == rows
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert {name: [line[name] for line in lines] for name in lines[0]} == rows
    with (tmp_path / "all.csv").open(newline="") as file:
        header, *body = csv.reader(file)
    assert header == ["index", "label", *(f"scores_{i}_{j}" for i in (0, 1) for j in (0, 1)), "half", "sure", "name"]
    assert [int(row[1]) for row in body] == rows["label"]
    assert [float(row[3]) for row in body] == [scores[0][1] for scores in rows["scores"]]
    assert [row[-1] for row in body] == rows["name"]


def test_rows_of_different_lengths(run_dir: Path, tmp_path: Path) -> None:
    task = Named(widths=[5, 4], odd="ragged")
    expected = [[int(label)] for label in numbers(23, 2)[1]]
    for ending in ("parquet", "jsonl"):
        instep.predict(run_dir, tmp_path / f"ragged.{ending}", task=task, quiet=True)
    tokens = pyarrow.parquet.read_table(tmp_path / "ragged.parquet")["tokens"].to_pylist()
    assert [row[:1] for row in tokens] == expected
    assert {len(row) for row in tokens} == {2, 3}
    lines = (tmp_path / "ragged.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == tokens
    for ending in ("npz", "csv"):
        with pytest.raises(TaskError, match="rows of different shapes"):
            instep.predict(run_dir, tmp_path / f"ragged.{ending}", task=task, quiet=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ragged.jsonl", "ragged.parquet"]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("rows", "'label' with the shape 1×4 for a batch of 8 samples"),
        ("mean", "the shape one number"),
        ("tuple", "returned a tuple"),
        ("index", "'index' is taken"),
        ("dtype", "'label' as float32 for one batch and as int64 for another"),
        ("names", "for some batches, and not for others"),
        ("nothing", "an empty dict"),
    ],
)
def test_what_cannot_be_written_is_refused(odd: str, words: str, run_dir: Path, tmp_path: Path) -> None:
    task = Named(widths=[5, 4], odd=odd)
    if odd in ("dtype", "names"):  # a difference between batches, whichever rank has them
        task.num_eval = 40
    with pytest.raises(TaskError, match=words):
        instep.predict(run_dir, tmp_path / "out.npz", task=task, quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_task_without_predict_is_told_what_to_add(folder: Path, tmp_path: Path) -> None:
    """If what its model returns cannot be written: here a sum over the samples."""
    instep.train(Summed(), run_dir=str(folder / "summed"), **SPEC)
    words = r"Summed has no predict\(\).*it returned 'prediction' with the shape 4 for.*\n    def predict\(self, model"
    with pytest.raises(TaskError, match=f"(?s){words}"):
        instep.predict(folder / "summed", tmp_path / "out.npz", quiet=True)


def test_which_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    """The last, the best, a step; damaged ones are never used unsaid."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    last, best = instep.evaluate(copy, quiet=True), instep.evaluate(copy, checkpoint="best", quiet=True)
    assert (last.step, best.step) == (6, 3)
    assert best.checkpoint == str(copy / "checkpoints" / "step-00000003")
    assert best.metrics["eval_loss"] > last.metrics["eval_loss"]
    assert instep.evaluate(copy, checkpoint=3, quiet=True) == best
    assert instep.evaluate(copy, checkpoint="best:eval_loss:min", quiet=True) == last
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    for choice, words in (("7", "no checkpoint of step 7. It has: 6, 3"), ("best:speed", "no best checkpoint")):
        with pytest.raises(CheckpointError, match=words):
            instep.evaluate(copy, checkpoint=choice, quiet=True)
    with pytest.raises(SpecError, match="checkpoint='worst' is unknown"):
        instep.evaluate(copy, checkpoint="worst", quiet=True)
    weights = copy / "checkpoints" / "step-00000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert instep.evaluate(copy, quiet=True).step == 3
    with pytest.raises(CheckpointError, match="damaged"):
        instep.evaluate(copy, checkpoint=6, quiet=True)
    assert sorted(entry.name for entry in (copy / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]


def test_which_data(folder: Path, tmp_path: Path) -> None:
    run_dir = folder / "two"
    trained = instep.train(TwoSets(), run_dir=str(run_dir), **SPEC)
    both = instep.evaluate(run_dir, quiet=True)
    assert both.metrics == pytest.approx(trained.metrics)
    assert both.num_samples == 14
    noisy = instep.evaluate(run_dir, data="noisy", quiet=True)
    assert noisy.metrics == {name: value for name, value in both.metrics.items() if name.startswith("noisy/")}
    assert instep.evaluate(run_dir, data="train", quiet=True).num_samples == 40
    assert instep.evaluate(run_dir, data=numbers(3, 1), quiet=True).num_samples == 3
    with pytest.raises(SpecError, match=r"several evaluation sets\. Give --data clean or noisy"):
        instep.predict(run_dir, tmp_path / "out.csv", quiet=True)
    assert instep.predict(run_dir, tmp_path / "out.csv", data="clean", quiet=True).num_samples == 9
    with pytest.raises(SpecError, match=r"data='test' is unknown. Use eval \(.*: clean, noisy\), train"):
        instep.evaluate(run_dir, data="test", quiet=True)
    with pytest.raises(SpecError, match="no function 'nothing'"):
        instep.evaluate(run_dir, data=f"{Path(two_samples.__code__.co_filename)}:nothing", quiet=True)


def test_a_task_that_remembers(folder: Path, tmp_path: Path) -> None:
    instep.train(Remembers(), run_dir=str(folder / "remembers"), **SPEC)
    instep.predict(folder / "remembers", tmp_path / "out.npz", quiet=True)
    assert set(numpy.load(tmp_path / "out.npz")["prediction"]) == {6.0}


def test_where_the_task_is(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    description = json.loads((copy / "spec.json").read_text())
    file = description["task"]["file"]
    task, path = TrainedRun.open(copy).task()
    assert str(path) == file == str(Path(two_samples.__code__.co_filename))
    assert (task.widths, task.shade.name, task.where) == ([5, 4], "LIGHT", Path("a b"))
    assert TrainedRun.open(copy).task(assignments=["num_eval=7"])[0].num_eval == 7
    for text, words in ((None, "does not say which file"), (str(tmp_path / "gone.py"), "is not there any more")):
        (copy / "spec.json").write_text(json.dumps(description | {"task": description["task"] | {"file": text}}))
        with pytest.raises(SpecError, match=words):
            instep.evaluate(copy, quiet=True)
        assert instep.evaluate(copy, task=f"{file}:Named", quiet=True).num_samples == 23
    with pytest.raises(CheckpointError, match=r"(?s)cannot be loaded.*Was Named changed since"):
        instep.evaluate(copy, task=Named(widths=[6, 4]), quiet=True)
    with pytest.raises(CheckpointError, match="is not a run directory"):
        instep.evaluate(tmp_path, quiet=True)
    with pytest.raises(SpecError, match="batch_size is not an option here"):
        instep.evaluate(run_dir, batch_size=3)


@given(value=st.one_of(st.booleans(), st.integers(), st.text(), st.none(), st.lists(st.integers()), st.floats(0, 1)))
@settings(max_examples=60)
def test_values_of_fields_are_read_as_they_were(value: Any) -> None:
    kind = str if isinstance(value, str) else type(value)
    actual = value_of("name", json.loads(json.dumps(plain_value(value))), kind, None)
    assert actual == value
    assert type(actual) is type(value)


def test_values_that_are_lost_are_asked_for() -> None:
    assert value_of("name", "fast", Literal["fast", "slow"] | None, None) == "fast"
    assert value_of("name", "['a']", list[str], None) == ["a"]
    with pytest.raises(SpecError, match="Give name=VALUE"):
        value_of("name", "<object object>", object, None)


@pytest.mark.parametrize("moment", ["Checkpoint", "load_saved"])
def test_a_run_that_still_trains(moment: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the lock, writes a checkpoint, and deletes the newest one while it is verified, or being read."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    directory = RunDirectory(copy)
    directory.lock()
    half_written = directory.checkpoints / ".step-00000009.1"
    half_written.mkdir()
    read, last = getattr(restored, moment), directory.checkpoints / "step-00000006"

    def read_late(*arguments: Any) -> Any:
        if last.exists():
            shutil.rmtree(last)
            raise FileNotFoundError(last)
        return read(*arguments)

    monkeypatch.setattr(restored, moment, read_late)
    try:
        assert instep.evaluate(copy, quiet=True).step == 3
        assert instep.predict(copy, tmp_path / "out.csv", quiet=True).step == 3
    finally:
        directory.unlock()
    assert half_written.exists()
    assert [event["event"] for event in read_events(copy)] == [event["event"] for event in read_events(run_dir)]


def test_a_killed_rank_is_restarted_or_leaves_nothing(
    run_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))  # those of failed ranks are kept
    out = tmp_path / "out.npz"
    task = Named(widths=[5, 4], dies=str(tmp_path / "died"))
    with pytest.raises(RanksFailed, match="rank 1: killed"):
        instep.predict(run_dir, out, task=task, processes=2, max_restarts=0, quiet=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["died"]
    (tmp_path / "died").unlink()
    assert instep.predict(run_dir, out, task=task, processes=2, quiet=True).num_samples == 23
    assert (tmp_path / "died").exists()
    instep.predict(run_dir, tmp_path / "undisturbed.npz", quiet=True)
    assert out.read_bytes() == (tmp_path / "undisturbed.npz").read_bytes()
    task = Named(widths=[5, 4], odd="raises", num_eval=40)
    with pytest.raises(RanksFailed, match="ZeroDivisionError: in predict"):
        instep.predict(run_dir, out, task=task, processes=2, force=True, quiet=True)
    assert out.read_bytes() == (tmp_path / "undisturbed.npz").read_bytes()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("size", ["64k", "600k"])  # too small for the parts; for the parts and the file
def test_a_full_disk(size: str, run_dir: Path, tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)]).returncode:
        pytest.skip("left out: namespaces (needs root)")
    try:
        (tmp_path / "out.csv").write_text("kept")
        task = Named(widths=[5, 4], num_eval=4000)
        for ending in ENDINGS:
            with pytest.raises(DataError, match=f"could not be written to {tmp_path}: the disk .* is full. Free some"):
                instep.predict(run_dir, tmp_path / f"out.{ending}", task=task, force=True, quiet=True)
            assert [entry.name for entry in tmp_path.iterdir()] == ["out.csv"]
        assert (tmp_path / "out.csv").read_text() == "kept"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_where_the_file_goes(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("kept")
    for path, words in (
        (out, "exists already"),
        (tmp_path / "none" / "out.csv", "does not exist"),
        (tmp_path / "out.xls", "Use .parquet, .npz, .jsonl, .csv"),
        (tmp_path / "out", "has no ending"),
    ):
        with pytest.raises(SpecError, match=words):
            instep.predict(run_dir, path, quiet=True)
    assert out.read_text() == "kept"
    for pid in (2**22 + 1, 1):  # of a command that was killed, and of one that still writes
        (tmp_path / f".out.jsonl.{socket.gethostname()}-{pid}.parts").mkdir()
    assert instep.predict(run_dir, out, force=True, quiet=True).num_samples == 23
    assert len(out.read_text().splitlines()) == 23
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(SpecError, match=r"needs the package pyarrow.*pip install 'instep\[data\]'"):
        instep.predict(run_dir, tmp_path / "out.parquet", quiet=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        f".out.jsonl.{socket.gethostname()}-1.parts",
        "out.jsonl",
    ]
