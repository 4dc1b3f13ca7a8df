"""The average of the weights: torch's own numbers, the same at any world size, under any strategy, and after a kill."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import instep
from instep.checkpoint.export import ExportSpec, export
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights, weights_sha256
from instep.core.errors import CheckpointError, SpecError, TaskError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.train.average import WeightAverage
from instep.train.result import load_model
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import made_up

STEPS, DECAY = 9, 0.8


class Tied(nn.Module):
    """Two names for one weight, and BatchNorm; 7 and 13 are no multiples of a vector's length."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.norm = nn.BatchNorm1d(13)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(13, 13), nn.Tanh()) for _ in range(2)))
        self.last = nn.Linear(13, 13)
        self.last.weight = self.blocks[0][0].weight
        self.head = nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.blocks(torch.tanh(self.norm(self.first(x))))))


@dataclass(kw_only=True)
class Averaged(instep.Task):
    """A classifier whose step `bad_at` has a loss that is not finite."""

    dtype: str = "float32"
    bad_at: int = 0
    dies_at: int = 0

    def model(self) -> nn.Module:
        return Tied().to(getattr(torch, self.dtype))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02)

    def train_data(self) -> Any:
        x, y = made_up(40, dtype=getattr(torch, self.dtype))
        return x, y, torch.arange(40)

    def eval_data(self) -> Any:
        return made_up(23, seed=2, dtype=getattr(torch, self.dtype))

    def loss(self, model: Any, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]).float(), batch[1])
        self.calls = getattr(self, "calls", 0) + torch.is_grad_enabled()
        return loss * torch.nan if self.calls == self.bad_at else loss

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"confidence": model(batch[0]).float().softmax(1).max(1).values}

    def on_step(self, record: Any) -> None:
        if record.step == self.dies_at:
            raise KeyboardInterrupt


def train(world: World, run_dir: str, options: dict[str, Any], fields: dict[str, Any]) -> tuple[Any, ...]:
    """Train; return the metrics of all evaluations, and the hashes of the weights and of their average."""
    spec = TrainSpec(
        **{
            "batch_size": 8,
            "steps": STEPS,
            "seed": 5,
            "ema": DECAY,
            "eval_every": "2",
            "threads": 1,
            "save_every": "never",
        }
        | options
    )
    with process_settings(spec, world.world_size):
        result = worker_main(world, Averaged(**fields), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    scores = {event["step"]: event["metrics"] for event in read_events(Path(run_dir)) if event["event"] == "eval"}
    return scores, result.weights_sha256, weights_sha256(load_weights(Path(run_dir), ema=True))


def alone(run_dir: Path, options: dict[str, Any] | None = None, **fields: Any) -> tuple[Any, ...]:
    return train(World.join(Place()), str(run_dir), options or {}, fields)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """The training in exact mode, on one process."""
    return alone(tmp_path_factory.mktemp("exact") / "1", {"exact": True, "shards": 4})


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(2, "ddp"), (3, "ddp"), (2, "fsdp"), (3, "fsdp")], ids=lambda value: str(value)
)
def test_the_same_bits(world_size: int, strategy: str, exact: tuple[Any, ...], tmp_path: Path) -> None:
    options = {"exact": True, "shards": 4, "strategy": strategy}
    assert run_ranks(train, world_size, str(tmp_path), options, {})[0] == exact


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_killed_and_continued(strategy: str, exact: tuple[Any, ...], tmp_path: Path) -> None:
    options = {"exact": True, "shards": 4, "save_every": "1"}
    with pytest.raises(KeyboardInterrupt):
        alone(tmp_path, options, dies_at=5)
    if strategy == "single":
        assert alone(tmp_path, options) == exact
    else:  # what one process saved is read as shards
        assert run_ranks(train, 2, str(tmp_path), {**options, "strategy": strategy}, {})[0] == exact


@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_weights_are_not_those_of_the_last_evaluation(reshard: bool, tmp_path: Path) -> None:
    options = {"strategy": "fsdp", "reshard": reshard}
    (scores, *_), *_ = run_ranks(train, 2, str(tmp_path / "2"), options, {"dtype": "float64"})
    expected, *_ = alone(tmp_path / "1", dtype="float64")
    assert scores == {step: pytest.approx(metrics, rel=1e-9) for step, metrics in expected.items()}
    averages = load_weights(tmp_path / "1", ema=True)
    for name, tensor in load_weights(tmp_path / "2", ema=True).items():
        torch.testing.assert_close(tensor, averages[name], rtol=1e-9, atol=1e-9)


def own_loop(run_dir: Path, bad_at: int) -> dict[str, torch.Tensor]:
    """Make the steps in a loop of one's own, with torch's AveragedModel beside it; return the latter's state."""
    task = Averaged(bad_at=bad_at)
    with instep.start(seed=5, run_dir=str(run_dir), ema=DECAY, on_nan="skip", save_every="never") as run:
        model, _ = run.prepare(task.model(), task.optimizer)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        for step in run.steps(task.train_data(), batch_size=8, steps=STEPS):
            step.compute(model, task.loss)
            if not step.finish().skipped:
                average.update_parameters(model)
        scores = [run.evaluate(task.metrics, task.eval_data(), ema=ema) for ema in (None, True, False)]
        expected = [_confidence(each, task) for each in (average.module, average.module, copy.deepcopy(model))]
        assert scores == [pytest.approx(each, rel=1e-6) for each in expected]
        assert scores[0] == scores[1] != scores[2]
        for ema, score in zip((None, True, False), scores, strict=True):
            rows = [run.gather(task.metrics(model, batch)) for batch in run.batches(task.eval_data(), ema=ema)]
            assert float(torch.cat([each["confidence"] for each in rows]).mean()) == pytest.approx(score["confidence"])
    return average.module.state_dict()


def _confidence(model: nn.Module, task: Averaged) -> dict[str, float]:
    with torch.no_grad():
        return {"confidence": float(task.metrics(model.eval(), task.eval_data())["confidence"].double().mean())}


@pytest.mark.parametrize("bad_at", [0, 1, 4], ids=["all steps", "the first is skipped", "one is skipped"])
def test_torchs_own_numbers(bad_at: int, tmp_path: Path) -> None:
    expected = own_loop(tmp_path, bad_at)
    actual = load_weights(tmp_path, ema=True)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    assert weights_sha256(actual) != weights_sha256(load_weights(tmp_path))


def test_exported_and_loaded(tmp_path: Path) -> None:
    _, _, averaged = alone(tmp_path / "run")
    newest, _ = RunDirectory(tmp_path / "run").newest()
    assert newest is not None
    done = export(newest.path, ExportSpec(tmp_path / "averaged.safetensors", ema=True))
    assert done.weights_sha256 == averaged == weights_sha256(load_weights(tmp_path / "averaged.safetensors"))
    model = load_model(Averaged(), tmp_path / "run", ema=True)
    assert weights_sha256(model.state_dict()) == averaged
    with pytest.raises(CheckpointError, match="holds one set of weights"):
        load_weights(tmp_path / "averaged.safetensors", ema=True)


def test_a_checkpoint_is_evaluated_as_the_run_was(tmp_path: Path) -> None:
    task, run = Averaged(), tmp_path / "run"
    result = instep.train(task, steps=STEPS, batch_size=8, ema=DECAY, run_dir=str(run), quiet=True)
    scores = {ema: instep.evaluate(run, task=task, ema=ema, quiet=True).metrics for ema in (None, True, False)}
    assert scores[None] == scores[True] == result.metrics
    assert scores[False] != result.metrics
    on_two = instep.evaluate(run, task=task, processes=2, strategy="fsdp", quiet=True)
    assert on_two.metrics == pytest.approx(result.metrics, rel=1e-5)


def test_half_precision_is_averaged_in_float32(tmp_path: Path) -> None:
    alone(tmp_path, {"ema": 0.999}, dtype="bfloat16")
    newest, _ = RunDirectory(tmp_path).newest()
    assert newest is not None
    assert {tensor.dtype for tensor in newest.part("ema")["weights"].values()} == {torch.float32}
    model = load_model(Averaged(dtype="bfloat16"), tmp_path, ema=True)
    assert next(model.parameters()).dtype == torch.bfloat16


def test_without_an_average(tmp_path: Path) -> None:
    instep.train(Averaged(), steps=1, batch_size=8, run_dir=str(tmp_path), quiet=True)
    with pytest.raises(CheckpointError, match="holds no averaged weights: the run was trained without --ema"):
        load_weights(tmp_path, ema=True)
    with pytest.raises(CheckpointError, match=r"^\S+ holds no averaged weights: the run was trained without --ema\.$"):
        instep.evaluate(tmp_path, task=Averaged(), ema=True, processes=1, quiet=True)
    with pytest.raises(SpecError, match=r"ema=1\.5 is not a decay"):
        TrainSpec(ema=1.5)
    with instep.start(run_dir=str(tmp_path / "loop")) as run, pytest.raises(TaskError, match="keeps no average"):
        run.prepare(Averaged().model(), Averaged().optimizer)
        run.evaluate(Averaged().metrics, Averaged().eval_data(), ema=True)


def drifting(world: World, run_dir: str) -> None:
    original = WeightAverage.update

    def update(self: WeightAverage) -> None:
        original(self)
        if self._num_updates == 3 and world.rank == 1:
            self._averages[0].view(-1)[0] += 1e-6

    WeightAverage.update = update  # type: ignore[method-assign]
    train(world, run_dir, {"check_every": 4}, {})


def test_averages_that_drift_apart_are_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks 0, 1 differ in the average of first\.weight"):
        run_ranks(drifting, 2, str(tmp_path))


class Copied(Averaged):
    """Its model's state_dict holds copies."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_state_dict_post_hook(
            lambda _module, state, *_: state.update({name: value.clone() for name, value in state.items()})
        )
        return model


def test_weights_that_would_have_no_name(tmp_path: Path) -> None:
    spec = TrainSpec(steps=1, batch_size=8, ema=DECAY)
    with pytest.raises(TaskError, match=r"state_dict does not hold the parameter first\.weight itself"):
        worker_main(World.join(Place()), Copied(), spec, RunDirectory(tmp_path))
