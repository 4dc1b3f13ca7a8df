"""`preprocess()` is fitted once in a run, at any number of processes, and all that uses the run sees the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import instep
from instep.checkpoint.export import ExportSpec, export
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CheckpointError, DataError, TaskError
from instep.core.topology import Place
from instep.data import StandardScaler, Vocabulary, load_fitted
from instep.data.statistics.stored import from_plain, to_plain
from instep.events.read import read_events
from instep.train.preprocessing import PREPROCESS, fit_here
from instep.train.worker import open_run, worker_main
from instep.world.world import World
from preprocess_tasks import Scaled, table
from ranks import run_ranks

SPEC: dict[str, Any] = {"exact": True, "shards": 5, "batch_size": 20, "save_every": "3", "seed": 3, "threads": 1}


def trained(world: World, run_dir: str, notes: str, steps: int = 7) -> tuple[str, dict[str, float]]:
    spec = instep.TrainSpec(steps=steps, **SPEC)
    result = worker_main(world, Scaled(notes=notes), spec, RunDirectory(Path(run_dir)))
    return result.weights_sha256, result.metrics


def new_run(folder: Path, name: str) -> tuple[str, str]:
    """Return a run directory, and a folder for what the Task notes."""
    (folder / f"notes-{name}").mkdir()
    return str(folder / name), str(folder / f"notes-{name}")


def num_calls(notes: str) -> int:
    calls = Path(notes) / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> instep.Result:
    """A training on one process."""
    run_dir, notes = new_run(folder, "alone")
    result = instep.train(Scaled(notes=notes), run_dir=run_dir, steps=7, quiet=True, **SPEC)
    assert num_calls(notes) == 1
    return result


def test_the_same_weights_at_two_processes(run: instep.Result, folder: Path) -> None:
    run_dir, notes = new_run(folder, "two")
    assert run_ranks(trained, 2, run_dir, notes) == [(run.weights_sha256, run.metrics)] * 2
    assert num_calls(notes) == 2  # on each rank
    parts = [Checkpoint(path).part(PREPROCESS)["json"] for path in (newest(run_dir), newest(run.run_dir))]
    assert torch.equal(*parts)


def newest(run_dir: str) -> Path:
    directory = RunDirectory(Path(run_dir))
    return directory.checkpoints / directory.names()[0]


def test_killed_and_continued_at_another_number_of_processes(run: instep.Result, folder: Path) -> None:
    run_dir, notes = new_run(folder, "killed")
    (Path(notes) / "die").touch()
    with pytest.raises(AssertionError, match=r"died without a word|PeerLost|onnection"):
        run_ranks(trained, 2, run_dir, notes)
    (Path(notes) / "die").unlink()
    (Path(notes) / "calls").unlink()
    assert "step-00000003" in RunDirectory(Path(run_dir)).names()
    assert run_ranks(trained, 3, run_dir, notes) == [(run.weights_sha256, run.metrics)] * 3
    assert num_calls(notes) == 0  # restored, never fitted again


def test_evaluate_and_predict_restore_it(run: instep.Result, folder: Path, tmp_path: Path) -> None:
    notes = str(folder / "notes-alone")
    evaluated = instep.evaluate(run.run_dir, quiet=True)
    assert evaluated.metrics == run.metrics
    instep.predict(run.run_dir, tmp_path / "all.npz", quiet=True)
    predicted = numpy.load(tmp_path / "all.npz")["prediction"]
    task = Scaled(notes=notes)
    model = instep.load_model(task, run.run_dir)
    x, ids, _ = task.eval_data()
    with torch.no_grad():
        expected = model(task.fitted["scaler"].transform(x), ids)
    torch.testing.assert_close(torch.from_numpy(predicted), expected, rtol=1e-12, atol=1e-12)
    assert run.load_model() is not None
    assert num_calls(notes) == 1


@pytest.mark.parametrize("target", ["out", "one.safetensors"])
def test_exports_carry_it(run: instep.Result, tmp_path: Path, target: str) -> None:
    done = export(newest(run.run_dir), ExportSpec(tmp_path / target))
    name = "one.preprocess.json" if "." in target else "preprocess.json"
    assert name in {path.name for path in done.files}
    fitted = load_fitted(done.files[0].parent / name)
    assert to_plain(fitted) == to_plain(load_fitted(run.run_dir))
    x, _, _ = table(90, 1)
    torch.testing.assert_close(fitted["scaler"].transform(x).std(0, correction=0)[:3], torch.ones(3).double())
    assert fitted["classes"] == ["a", "b", "c"]
    task = Scaled()
    model = instep.load_model(task, tmp_path / target)
    assert to_plain(task.fitted) == to_plain(fitted)
    assert all(map(torch.equal, model.state_dict().values(), run.load_model().state_dict().values()))
    with pytest.raises(CheckpointError, match="already exist"):
        export(newest(run.run_dir), ExportSpec(tmp_path / target))


def test_a_run_that_had_none_fits_now_and_says_so(tmp_path: Path) -> None:
    def begin(fit: Any = None) -> Any:
        spec = instep.TrainSpec(batch_size=4, steps=2)
        with open_run(World.join(Place()), spec, RunDirectory(tmp_path), "x") as run:
            fitted = run.preprocess(fit) if fit is not None else None
            run.prepare(torch.nn.Linear(1, 1), lambda params: torch.optim.SGD(params, lr=0.1))
            run.save()
            run.finish_saving()
        return fitted

    begin()
    assert begin(lambda: {"number": 3}) == {"number": 3}
    assert begin(lambda: {"number": 4}) == {"number": 3}
    texts = [event["text"] for event in read_events(tmp_path) if event["event"] == "notice"]
    assert sum("preprocess() is fitted now" in text for text in texts) == 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"scaler": StandardScaler()}, r"preprocess\(\)\['scaler'\] is a StandardScaler that is not fitted"),
        ({"thing": object()}, r"preprocess\(\)\['thing'\] is a object, which a checkpoint cannot hold"),
        (StandardScaler(), r"preprocess\(\) returned a StandardScaler; a dict of fitted things"),
    ],
)
def test_what_preprocess_may_not_return(returned: Any, message: str, tmp_path: Path) -> None:
    with (
        pytest.raises(TaskError, match=message),
        open_run(World.join(Place()), instep.TrainSpec(), RunDirectory(tmp_path), "x") as run,
    ):
        run.preprocess(lambda: returned)


def test_everything_comes_back_from_plain_values() -> None:
    data = numpy.array([[1.0, numpy.nan], [2.0, 5.0]])
    fitted = {
        "scaler": StandardScaler(with_mean=False).fit(data),
        "words": Vocabulary(max_size=5).fit(["a b"]),
        "tensor": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "array": numpy.float32([0.1, numpy.inf]),
        "value": {"n": 3, "names": ["a", None]},
    }
    again = from_plain(json.loads(json.dumps(to_plain(fitted))))
    assert json.dumps(to_plain(again)) == json.dumps(to_plain(fitted))
    assert again["scaler"].with_mean is False
    assert again["tensor"].dtype is torch.int32
    assert again["array"].dtype == numpy.float32
    assert again["value"] == fitted["value"]


def test_a_field_or_a_file_that_is_wrong(tmp_path: Path) -> None:
    task = Scaled(notes=str(tmp_path))
    fit_here(task)
    fit_here(task)
    assert num_calls(str(tmp_path)) == 1
    with pytest.raises(DataError, match=r"holds no preprocess\.json"):
        load_fitted(tmp_path)
    (tmp_path / "preprocess.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"does not hold what preprocess\(\) returned"):
        load_fitted(tmp_path)
