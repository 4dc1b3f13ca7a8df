"""torchmetrics' objects, of every kind of state, on any number of ranks: what one object gives for the whole set."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics as tm
from torchmetrics.wrappers import ClasswiseWrapper

import instep
from instep.core.errors import TaskError
from instep.train.evaluate import evaluate
from instep.train.metric_objects import gather_states, is_metric
from instep.train.reading import chunk_rows
from instep.world.world import World
from ranks import run_ranks
from tasks import Small

CLASSES = {"task": "multiclass", "num_classes": 4}
ROWS, CHUNK = 61, 8
METRICS = {
    "summed": lambda: tm.Accuracy(**CLASSES),
    "by class": lambda: tm.Accuracy(**CLASSES, average=None),
    "list": lambda: tm.AUROC(**CLASSES),
    "binned": lambda: tm.AUROC(**CLASSES, thresholds=20),
    "largest": tm.MaxMetric,
    "smallest": tm.MinMetric,
    "mean": tm.MeanMetric,
    "stacked": tm.PearsonCorrCoef,
    "squares": tm.MeanSquaredError,
    "ranked": tm.SpearmanCorrCoef,
    "collection": lambda: tm.MetricCollection([tm.F1Score(**CLASSES), tm.Precision(**CLASSES), tm.Recall(**CLASSES)]),
    "wrapped": lambda: ClasswiseWrapper(tm.Recall(**CLASSES, average=None)),
}
ONE_ARGUMENT = ("largest", "smallest", "mean")
NUMBERS = ("stacked", "squares", "ranked")


@functools.cache
def answers() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(ROWS, 4, generator=generator).softmax(1), torch.randint(4, (ROWS,), generator=generator)


def update(name: str, metric: Any, predicted: torch.Tensor, actual: torch.Tensor) -> None:
    if name in ONE_ARGUMENT:
        metric.update(predicted)
    elif name in NUMBERS:
        metric.update(predicted[:, 0], actual.float())
    else:
        metric.update(predicted, actual)


def evaluated(world: World) -> tuple[dict[str, float], dict[str, float]]:
    """Evaluate twice with the same objects, as a Task that keeps them does."""
    predicted, actual = answers()
    kept = {name: make() for name, make in METRICS.items()}

    def metrics_of(rows: slice) -> dict[str, Any]:
        for name, metric in kept.items():
            update(name, metric, predicted[rows], actual[rows])
        return kept

    starts = range(world.rank * CHUNK, ROWS, world.world_size * CHUNK)
    chunks = [(slice(start, start + CHUNK), min(CHUNK, ROWS - start)) for start in starts]
    return evaluate(metrics_of, chunks, world), evaluate(metrics_of, chunks, world)


@functools.cache
def by_ranks(world_size: int) -> tuple[dict[str, float], dict[str, float]]:
    return run_ranks(evaluated, world_size)[0]


@pytest.mark.filterwarnings("ignore:Metric .* will save all targets")
@pytest.mark.parametrize("name", METRICS)
def test_one_object_for_the_whole_set(name: str) -> None:
    metric = METRICS[name]()
    update(name, metric, *answers())
    value = metric.compute()
    entries = list(value.values()) if isinstance(value, dict) else value.reshape(-1).tolist()
    actual = [number for key, number in by_ranks(1)[0].items() if key.split("/")[0] == name]
    assert actual == pytest.approx([float(entry) for entry in entries], rel=1e-5)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_bits_on_any_number_of_ranks(world_size: int) -> None:
    assert by_ranks(world_size)[0] == by_ranks(1)[0]


def test_objects_that_are_kept_begin_anew() -> None:
    first, second = by_ranks(2)
    assert first == second


@dataclass(kw_only=True)
class Kept(Small):
    """Keeps an object over evaluations, and updates it in the loss, too."""

    def __post_init__(self) -> None:
        self.seen = tm.Accuracy(task="multiclass", num_classes=3)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        if torch.is_grad_enabled():
            self.seen.update(model(x).detach(), (y + 1) % 3)
        return super().loss(model, batch)

    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = batch
        self.seen.update(model(x), y)
        return super().metrics(model, batch) | {"seen": self.seen}


class Matrix(Small):
    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = batch
        confusion = tm.ConfusionMatrix(task="multiclass", num_classes=3)
        confusion.update(model(x), y)
        return {"confusion": confusion}


def test_a_task_that_keeps_one(tmp_path: Path) -> None:
    result = instep.train(Kept(), epochs=2, batch_size=10, threads=1, quiet=True, run_dir=str(tmp_path))
    assert result.metrics["seen"] == pytest.approx(result.metrics["accuracy"])
    with pytest.raises(TaskError, match=r"computes a tensor of shape \(3, 3\)"):
        instep.train(Matrix(), epochs=1, batch_size=10, threads=1, quiet=True, run_dir=str(tmp_path / "matrix"))


def test_what_is_a_metric() -> None:
    assert is_metric(tm.MeanMetric())
    assert not is_metric({"a": 1})
    assert not is_metric(torch.zeros(3))


def test_one_element_of_any_stride_travels() -> None:
    assert run_ranks(gathered_column, 1) == [[[1.0]]]


def gathered_column(world: World) -> Any:
    column = torch.arange(3.0).view(1, 3)[:, 1:2]  # contiguous by torch's count, with a stride of 3
    (state,) = gather_states([{"values": [column]}], world)
    return state["values"][0].tolist()


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "rows"), [(64, 1, 8), (256, 1, 32), (8, 1, 8), (3, 1, 3), (16, 4, 4)]
)
def test_chunks_have_several_rows(batch_size: int, accumulate: int, rows: int) -> None:
    assert chunk_rows(instep.TrainSpec(batch_size=batch_size, accumulate=accumulate)) == rows
