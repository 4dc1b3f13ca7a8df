"""What people take for granted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights
from instep.core.errors import CheckpointError, NumericsError, SpecError, TaskError
from instep.events.read import read_events
from instep.events.schema import StepRecord
from instep.train.worker import worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small, made_up


def train(task: Any, run_dir: Path, **options: Any) -> instep.Result:
    return instep.train(
        task,
        **{"epochs": 2, "batch_size": 10, "threads": 1, "quiet": True, "run_dir": str(run_dir)} | options,
    )


def on_ranks(task: Any, run_dir: Path, world_size: int, **options: Any) -> list[Any]:
    spec = instep.TrainSpec(**{"epochs": 2, "batch_size": 10, "threads": 1} | options)
    return run_ranks(train_rank, world_size, task, spec, str(run_dir))


def train_rank(world: World, task: Any, spec: instep.TrainSpec, run_dir: str) -> Any:
    result = worker_main(world, task, spec, RunDirectory(Path(run_dir)))
    return result.to_json() | {"records": getattr(task, "records", None)}


@dataclass(kw_only=True)
class Grouped(Small):
    """Two groups of parameters, and one parameter that is frozen."""

    def model(self) -> nn.Module:
        model = super().model()
        model[0].bias.requires_grad_(False)
        return model

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        assert "0.bias" not in dict(params.named)
        groups = [
            {"params": [p for name, p in params.named if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for name, p in params.named if name.endswith("bias")], "lr": 0.01},
        ]
        return torch.optim.AdamW(groups, lr=self.lr)


def test_parameter_groups_and_frozen_parameters(tmp_path: Path) -> None:
    one = train(Grouped(), tmp_path / "one")
    two = on_ranks(Grouped(), tmp_path / "two", 2)[0]
    assert two["loss"] == pytest.approx(one.loss, rel=1e-10)
    trained = one.load_model()
    torch.manual_seed(0)
    start = instep.load_model(Grouped(), train(Grouped(), tmp_path / "short", steps=1, epochs=None).run_dir)
    assert torch.equal(trained[0].bias, start[0].bias)
    assert not torch.equal(trained[4].bias, start[4].bias)


class Pair(NamedTuple):
    x: torch.Tensor
    rest: dict[str, Any]


@dataclass
class Nested:
    pair: Pair
    name: str


class NestedSet(torch.utils.data.Dataset):
    """Samples of dataclasses of named tuples of dicts; read one by one."""

    def __init__(self) -> None:
        self.x, self.y = made_up(43)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Nested:
        return Nested(Pair(self.x[index], {"y": self.y[index], "index": index}), name=f"sample {index}")


@dataclass(kw_only=True)
class NestedTask(Small):
    def train_data(self) -> Any:
        return NestedSet()

    def eval_data(self) -> Any:
        return None

    def collate(self, samples: list[Nested]) -> Nested:
        x = torch.stack([s.pair.x for s in samples])
        y = torch.stack([s.pair.rest["y"] for s in samples])
        return Nested(Pair(x, {"y": y}), name="batch")

    def loss(self, model: Any, batch: Nested) -> Any:
        return F.cross_entropy(model(batch.pair.x), batch.pair.rest["y"])


def test_nested_batches_read_sample_by_sample_equal_those_read_whole(tmp_path: Path) -> None:
    whole = train(Small(), tmp_path / "whole")
    for workers in (0, 1):
        nested = train(NestedTask(), tmp_path / f"nested{workers}", data_workers=workers)
        assert nested.loss == whole.loss
        assert nested.weights_sha256 == whole.weights_sha256


def test_init_from_takes_weights_and_nothing_else(tmp_path: Path) -> None:
    first = train(Small(), tmp_path / "first")
    second = train(Small(), tmp_path / "second", init_from=first.run_dir, steps=1, epochs=None)
    assert second.steps == 1
    bare = train(Small(), tmp_path / "bare", steps=1, epochs=None)
    assert second.loss < 0.95 * bare.loss  # trained weights
    file = tmp_path / "weights.safetensors"
    save_file(first.load_model().state_dict(), file)
    third = train(Small(), tmp_path / "third", init_from=str(file), steps=1, epochs=None)
    assert third.weights_sha256 == second.weights_sha256
    with pytest.raises(CheckpointError, match="do not fit the model"):
        train(Misfit(), tmp_path / "misfit", init_from=str(file))


class Misfit(Small):
    def model(self) -> nn.Module:
        return nn.Linear(6, 3).double()


@dataclass(kw_only=True)
class Stopping(Small):
    """Stops when rank 0 has seen enough; the other ranks' word does not count."""

    records: list[StepRecord] = field(default_factory=list)

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def stop(self, record: StepRecord) -> bool:
        return bool(self.records) and record.step >= 7


def test_early_stopping_is_agreed_and_records_come_on_rank_0_only(tmp_path: Path) -> None:
    ranks = on_ranks(Stopping(), tmp_path, 3, epochs=4, eval_every="3")
    assert [rank["steps"] for rank in ranks] == [7, 7, 7]
    records = ranks[0]["records"]
    assert [record.step for record in records] == list(range(1, 8))
    assert ranks[1]["records"] == ranks[2]["records"] == []
    assert [bool(record.metrics) for record in records] == [False, False, True, False, False, True, False]
    events = [e for e in read_events(tmp_path) if e["event"] == "step"]
    assert [e["loss"] for e in events] == [record.loss for record in records]
    with pytest.raises(AttributeError):
        records[0].loss = 0.0  # frozen


class F1:
    def __init__(self, predicted: torch.Tensor, actual: torch.Tensor) -> None:
        self.hits = torch.zeros((), dtype=torch.int64)
        self.named = torch.zeros((), dtype=torch.int64)
        self.update(predicted, actual)

    def update(self, predicted: torch.Tensor, actual: torch.Tensor) -> None:
        self.hits += (predicted & actual).sum()
        self.named += predicted.sum() + actual.sum()

    def compute(self) -> torch.Tensor:
        return 2 * self.hits / self.named


class WithF1(Small):
    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return {"f1": F1(model(x).argmax(1) == 1, y == 1)}


def test_metric_objects_are_summed_over_batches_and_ranks(tmp_path: Path) -> None:
    one = train(WithF1(), tmp_path / "one")
    # 23 evaluation samples in chunks of 2 on 4 ranks, and one chunk for all on 1: the same counts.
    four = on_ranks(WithF1(), tmp_path / "four", 4)[0]
    assert four["metrics"]["f1"] == one.metrics["f1"]
    x, y = Small().eval_data()
    predicted = one.load_model()(x).argmax(1) == 1
    expected = 2 * (predicted & (y == 1)).sum() / (predicted.sum() + (y == 1).sum())
    assert one.metrics["f1"] == pytest.approx(float(expected))


def test_load_model_gives_the_weights_that_the_hash_names(tmp_path: Path) -> None:
    from instep.checkpoint.weights import weights_sha256

    result = train(Small(), tmp_path)
    model = result.load_model()
    assert not model.training
    assert weights_sha256(model.state_dict()) == result.weights_sha256
    x, y = Small().eval_data()
    assert float((model(x).argmax(1) == y).double().mean()) == result.metrics["accuracy"]


def test_the_best_checkpoint_and_the_history(tmp_path: Path) -> None:
    result = train(Small(), tmp_path, epochs=4, keep_best="accuracy", keep=9, save_every="5")
    events = read_events(tmp_path)
    scores = {e["step"]: e["metrics"]["accuracy"] for e in events if e["event"] == "eval"}
    step = max(scores, key=lambda number: (scores[number], number))
    assert result.best == tmp_path / "checkpoints" / f"step-{step:08}"
    best, there = instep.load_model(Small(), tmp_path, best=True), instep.load_model(Small(), result.best)
    x, y = Small().eval_data()
    for model in (best, there):
        assert float((model(x).argmax(1) == y).double().mean()) == scores[step]
    worst = instep.load_model(Small(), tmp_path, best="accuracy:min")
    assert float((worst(x).argmax(1) == y).double().mean()) == min(scores.values())
    with pytest.raises(CheckpointError, match=r"no best checkpoint: none has 'f1'\. Metrics .*: accuracy, eval_loss"):
        instep.load_model(Small(), tmp_path, best="f1")
    steps = [e for e in events if e["event"] == "step"]
    assert [entry["step"] for entry in result.history] == [5, 10, 15, 20]
    assert [entry["metrics"]["accuracy"] for entry in result.history] == [scores[number] for number in (5, 10, 15, 20)]
    first = result.history[0]
    assert first["loss"] == sum(e["loss"] * e["num_samples"] for e in steps[:5]) / 43
    assert (first["epoch"], first["lr"]) == (1, 0.05)


def test_the_checkpoint_format_carries_a_version(tmp_path: Path) -> None:
    result = train(Small(), tmp_path)
    manifest = next((tmp_path / "checkpoints").glob("step-*")) / "manifest.json"
    content = json.loads(manifest.read_text())
    assert content["version"] == 2
    manifest.write_text(json.dumps(content | {"version": 99}))
    with pytest.raises(CheckpointError, match="format version 99"):
        result.load_model()


class Bad(Small):
    """A Task whose loss is NaN for one sample."""

    def loss(self, model: Any, batch: Any) -> Any:
        x, _ = batch
        poison = torch.where((x == made_up(43)[0][17]).all(1), torch.nan, 0.0).sum()
        return super().loss(model, batch) + poison


def test_nan_stops_and_names_step_samples_and_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NumericsError) as caught:
        train(Bad(), tmp_path, save_every="1", seed=2)
    text = str(caught.value)
    step = next(e for e in read_events(tmp_path) if e["event"] == "end")["step"] + 1
    assert step > 1
    assert f"the loss of step {step} is nan" in text
    assert "17" in text.split("samples:")[1].split(".")[0].replace(",", "").split()
    assert f"step-{step - 1:08d}" in text


def test_nan_skips_the_update_if_asked(tmp_path: Path) -> None:
    result = train(Bad(), tmp_path, on_nan="skip")
    skipped = [e for e in read_events(tmp_path) if e["event"] == "step" and e.get("skipped")]
    assert len(skipped) == 2  # once an epoch
    assert result.steps == 10
    assert all(torch.isfinite(t).all() for t in result.load_model().state_dict().values())  # statistics too


class RootOfZero(Small):
    """A finite loss whose gradient is not."""

    def loss(self, model: Any, batch: Any) -> Any:
        x, _ = batch
        bad = (x == made_up(43)[0][17]).all(1).any()
        return super().loss(model, batch) + (model(x)[0, 0] * 0.0).sqrt() * (1.0 if bad else 0.0)


def test_a_gradient_that_is_not_finite_is_skipped_or_never_saved(tmp_path: Path) -> None:
    result = train(RootOfZero(), tmp_path / "skip", on_nan="skip", clip_norm=1.0)
    assert all(torch.isfinite(t).all() for t in result.load_model().state_dict().values())
    with pytest.raises(NumericsError, match="not finite"):
        train(RootOfZero(), tmp_path / "stop", save_every="1")
    for name in RunDirectory(tmp_path / "stop").names():
        weights = load_weights(tmp_path / "stop" / "checkpoints" / name)
        assert all(torch.isfinite(t).all() for t in weights.values())


class Vector(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")


class Functional(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y) + 0 * torch.multinomial(torch.ones(len(x), 4), 1).sum()


def test_a_vector_loss_is_explained(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"loss returned a tensor of shape \(10,\); the mean over the batch"):
        train(Vector(), tmp_path)


def test_noise_that_cannot_be_owned_is_named_once(tmp_path: Path) -> None:
    train(Functional(), tmp_path)
    notices = [e["text"] for e in read_events(tmp_path) if e["event"] == "notice"]
    assert len(notices) == 1
    assert "test_conveniences.py" in notices[0]
    assert "loss" in notices[0]
    train(Small(), tmp_path / "clean")
    assert not [e for e in read_events(tmp_path / "clean") if e["event"] == "notice"]


def test_one_value_a_channel_is_refused_before_the_first_update(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="--drop-last"):
        train(Small(num_samples=41), tmp_path)
    assert not [e for e in read_events(tmp_path) if e["event"] == "step"]
    assert train(Small(num_samples=41), tmp_path / "dropped", drop_last=True).steps == 8


def test_a_batch_smaller_than_the_world_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"batch_size=2 leaves ranks 2\.\.3 of 4 without a sample"):
        on_ranks(Small(), tmp_path, 4, batch_size=2)
    with pytest.raises(SpecError, match="some would be empty"):
        instep.TrainSpec(batch_size=2, accumulate=3)


def test_a_notebook_keeps_its_threads_and_its_denormals(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    train(Small(), tmp_path, threads=threads + 1)
    assert torch.get_num_threads() == threads
    assert float(torch.tensor(1e-40) * 1) > 0
