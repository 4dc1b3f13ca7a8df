"""Training by a curriculum: the same bits at any world size and after a kill; scores computed once, or by the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import instep
from instep.checkpoint.files import Checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import DataError, TaskError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.train import curriculum as scoring
from instep.train.worker import make_result, open_run, worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small, made_up

COUNT, STEPS = 44, 36  # six epochs of six steps, the last of four samples
EXACT: dict[str, Any] = {"exact": True, "shards": 4}
SCORES = np.sin(np.arange(COUNT))


@dataclass(kw_only=True)
class Paced(Small):
    """Each kind of difficulty; `counts` is a file to which each call of `difficulty` adds a byte."""

    by: str = "function"
    counts: str = ""
    dies_at: int = 0
    metric: str = "hardness"

    def train_data(self) -> Any:
        data = made_up(COUNT)
        if self.by == "function":
            return instep.data.curriculum(data, epochs=4)
        if self.by == "array":
            return instep.data.curriculum(data, SCORES, pacing="steps", buckets=3, steps=20)
        if self.by == "uneven":
            return instep.data.curriculum(data, torch.rand(COUNT), epochs=2)
        if self.by == "trimmed":
            return instep.data.curriculum(data, self.metric, start=0.4, end=0.7, epochs=2, rescore=1)
        return instep.data.curriculum(data, self.metric, pacing="root", epochs=5, rescore=2)

    def difficulty(self, sample: Any) -> float:
        if self.counts:
            with Path(self.counts).open("a") as file:
                file.write(".")
        return float(sample[0].abs().sum())

    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = batch
        logits = model(x)
        values = {"hardness": F.cross_entropy(logits, y, reduction="none"), "mean": (logits.mean(), 1.0)}
        return values | ({"by_class": logits} if self.metric == "by_class" else {})

    def on_step(self, record: Any) -> None:
        if record.step == self.dies_at:
            raise KeyboardInterrupt


def train(world: World, run_dir: str, options: dict[str, Any], fields: dict[str, Any]) -> tuple[Any, ...]:
    """Train; return the weights, and the losses of the steps."""
    spec = TrainSpec(**{"batch_size": 8, "steps": STEPS, "seed": 5, "save_every": "never", **options})
    result = worker_main(world, Paced(**fields), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    losses = {event["step"]: event["loss"] for event in read_events(Path(run_dir)) if event["event"] == "step"}
    return result.weights_sha256, result.metrics, losses


def alone() -> World:
    return World.join(Place())


@pytest.mark.parametrize("by", ["function", "array", "model", "trimmed"])
def test_the_same_bits_at_any_world_size_and_after_a_kill(by: str, tmp_path: Path) -> None:
    expected = train(alone(), str(tmp_path / "1"), EXACT, {"by": by})
    plain = worker_main(alone(), Small(num_samples=COUNT), _spec(), RunDirectory(tmp_path / "plain"))
    assert plain.weights_sha256 != expected[0]
    for world_size in (2, 3) if by in ("function", "model") else ():
        assert run_ranks(train, world_size, str(tmp_path / str(world_size)), EXACT, {"by": by})[0] == expected
    options = {**EXACT, "save_every": "8"}
    # Of step 24 there is a checkpoint, and the model scores after it.
    for dies_at in (15, 25) if by == "model" else (15,):
        killed = str(tmp_path / f"killed-{dies_at}")
        with pytest.raises(KeyboardInterrupt):
            train(alone(), killed, options, {"by": by, "dies_at": dies_at})
        assert run_ranks(train, 2, killed, options, {"by": by})[0] == expected


def _spec() -> TrainSpec:
    return TrainSpec(batch_size=8, steps=STEPS, seed=5, save_every="never", **EXACT)


def test_a_function_is_called_once_for_each_sample_and_never_again(tmp_path: Path) -> None:
    counts, options = tmp_path / "counts", {**EXACT, "save_every": "4", "data_workers": 0}
    fields = {"counts": str(counts)}
    with pytest.raises(KeyboardInterrupt):
        train(alone(), str(tmp_path / "run"), options, {**fields, "dies_at": 9})
    assert counts.stat().st_size == COUNT
    train(alone(), str(tmp_path / "run"), options, fields)
    assert counts.stat().st_size == COUNT
    run_ranks(train, 3, str(tmp_path / "three"), options, fields)
    assert counts.stat().st_size == 2 * COUNT


def test_the_model_scores_with_its_weights_of_that_moment(tmp_path: Path) -> None:
    train(alone(), str(tmp_path), {**EXACT, "save_every": "12", "keep": 10, "steps": 25}, {"by": "model"})
    checkpoints = {entry.step: entry for entry in map(Checkpoint, (tmp_path / "checkpoints").glob("step-*"))}
    parts = {step: checkpoint.part("curriculum") for step, checkpoint in checkpoints.items()}
    # There are no scores before the first two epochs are over; a checkpoint at a border has those before it.
    assert {step: part["first_epoch"] for step, part in parts.items()} == {12: -1, 24: 2, 25: 4}
    model = instep.load_model(Paced(), checkpoints[24].path)
    x, y = made_up(COUNT)
    with torch.no_grad():
        expected = F.cross_entropy(model(x), y, reduction="none")
    torch.testing.assert_close(parts[25]["scores"], expected)


def test_shards_of_the_model_score_as_the_whole_one(tmp_path: Path) -> None:
    _, _, expected = train(alone(), str(tmp_path / "1"), {}, {"by": "model"})
    options = {"strategy": "fsdp", "save_every": "8"}
    _, _, losses = run_ranks(train, 2, str(tmp_path / "2"), {**options, "steps": 26}, {"by": "model"})[0]
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-9)
    _, _, continued = run_ranks(train, 2, str(tmp_path / "2"), options, {"by": "model"})[0]
    assert continued == pytest.approx(expected, rel=1e-9)


def test_the_log_says_that_scoring_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_QUIET_S", -1.0)
    train(alone(), str(tmp_path), {"steps": 1}, {})
    assert any("scoring the difficulty of the samples, 100 %" in text for text in notices(tmp_path))


def own_loop(world: World, run_dir: str, stops: tuple[int, ...]) -> str:
    x, y = made_up(COUNT)
    with open_run(world, TrainSpec(batch_size=8, seed=5, **EXACT), RunDirectory(Path(run_dir)), "loop") as run:
        model, _ = run.prepare(nn.Linear(6, 3).double(), lambda params: torch.optim.SGD(params, lr=0.05))
        run.score_by(lambda m, batch: {"loss": F.cross_entropy(m(batch[0]), batch[1], reduction="none")})
        data = instep.data.curriculum((x, y), "loss", epochs=5)
        for stop in stops:
            for step in run.steps(data, steps=stop):
                for features, labels in step.shards():
                    step.backward(F.cross_entropy(model(features), labels))
                step.finish()
        run.save_last()
        return str(make_result(run, 0.0, 0).weights_sha256)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    expected = own_loop(alone(), str(tmp_path / "a"), (STEPS,))
    assert own_loop(alone(), str(tmp_path / "b"), (6, 11, STEPS)) == expected
    assert run_ranks(own_loop, 2, str(tmp_path / "c"), (STEPS,)) == [expected] * 2
    own_loop(alone(), str(tmp_path / "d"), (12,))
    assert own_loop(alone(), str(tmp_path / "d"), (STEPS,)) == expected


def notices(run_dir: Path) -> list[str]:
    return [event["text"] for event in read_events(run_dir) if event["event"] == "notice"]


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("surprise", "the metric 'surprise', and metrics\\(\\) returns 'hardness', 'mean'"),
        ("mean", "the metric 'mean', which gave a tuple for 8 samples"),
        ("by_class", r"the metric 'by_class', which gave the shape \[8, 3\] for 8 samples"),
    ],
)
def test_a_metric_that_scores_no_samples_is_refused_before_the_first_step(
    metric: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=words):
        train(alone(), str(tmp_path), {}, {"by": "model", "metric": metric})
    assert not any(event["event"] == "step" for event in read_events(tmp_path))


def refusal(world: World, run_dir: str) -> str:
    torch.manual_seed(world.rank)
    with pytest.raises(DataError) as caught:
        spec = TrainSpec(batch_size=8, steps=2, save_every="never", eval_every="never")
        worker_main(world, Drawn(rank=world.rank), spec, RunDirectory(Path(run_dir)))
    return str(caught.value)


@dataclass(kw_only=True)
class Drawn(Paced):
    rank: int = 0

    def train_data(self) -> Any:
        return instep.data.curriculum(made_up(COUNT), SCORES + self.rank, epochs=2)


def test_scores_that_differ_by_rank_are_refused(tmp_path: Path) -> None:
    for text in run_ranks(refusal, 2, str(tmp_path)):
        assert "The difficulty on rank 1 differs from that on rank 0" in text


def test_a_run_keeps_the_scores_that_it_began_with(tmp_path: Path) -> None:
    expected = train(alone(), str(tmp_path / "1"), EXACT, {"by": "array"})
    options = {**EXACT, "save_every": "4"}
    with pytest.raises(KeyboardInterrupt):
        train(alone(), str(tmp_path / "2"), options, {"by": "array", "dies_at": 5})
    SCORES[:] = SCORES[::-1].copy()
    try:
        assert train(alone(), str(tmp_path / "2"), options, {"by": "array"}) == expected
    finally:
        SCORES[:] = SCORES[::-1].copy()
    assert any("is not the one that this run began with" in text for text in notices(tmp_path / "2"))


@dataclass(kw_only=True)
class Unused(Small):
    def difficulty(self, sample: Any) -> float:
        return 0.0


@dataclass(kw_only=True)
class WithoutDifficulty(Small):
    def train_data(self) -> Any:
        return instep.data.curriculum(made_up(COUNT), epochs=2)


def test_a_difficulty_that_is_not_used_and_one_that_is_missing(tmp_path: Path) -> None:
    spec = TrainSpec(batch_size=8, steps=2, save_every="never", eval_every="never")
    worker_main(alone(), Unused(), spec, RunDirectory(tmp_path / "a"))
    assert any("difficulty() of the Task has no effect" in text for text in notices(tmp_path / "a"))
    with pytest.raises(TaskError, match=r"define difficulty\(sample\) there"):
        worker_main(alone(), WithoutDifficulty(), spec, RunDirectory(tmp_path / "b"))
