"""Precision: what is cast and what is not, the scale of a loss, and the same loss as in fp32."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import instep
from instep.core.errors import CheckpointError, SpecError
from instep.events.read import read_events
from instep.train.precision import LossScale, resolve_precision
from instep.train.source import load_file, task_class
from tasks import Small, made_up

CHARLM = Path(__file__).parents[2] / "examples" / "charlm.py"
OPTIONS: dict[str, Any] = {"threads": 1, "quiet": True}


def notices(run_dir: Path) -> list[str]:
    return [e["text"] for e in read_events(run_dir) if e["event"] == "notice"]


def test_auto_is_fp32_on_cpu_and_resolved_in_the_recipe(tmp_path: Path) -> None:
    instep.train(Small(), steps=1, batch_size=16, run_dir=str(tmp_path), **OPTIONS)
    assert json.loads((tmp_path / "spec.json").read_text())["recipe"]["precision"] == "fp32"
    assert notices(tmp_path) == []  # a plain training is a quiet one
    with pytest.raises(CheckpointError, match="precision: 'fp32' there, 'bf16' now"):
        instep.train(Small(), steps=2, batch_size=16, run_dir=str(tmp_path), precision="bf16", **OPTIONS)
    assert instep.train(Small(), steps=2, batch_size=16, run_dir=str(tmp_path), precision="fp32", **OPTIONS).steps == 2


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="tf32 is a number format of GPUs"):
        instep.train(Small(), steps=1, precision="tf32", **OPTIONS)
    with pytest.raises(SpecError, match="precision='fp8' is unknown"):
        instep.TrainSpec(precision="fp8")
    assert resolve_precision(instep.TrainSpec(precision="tf32"), "cuda:0").precision == "tf32"


@pytest.mark.timeout(120)
def test_charlm_reaches_the_loss_of_fp32(tmp_path: Path) -> None:
    results = {}
    for precision in ("fp32", "bf16", "fp16"):
        task = task_class(load_file(CHARLM), CHARLM)(length=32, width=32)
        result = instep.train(
            task, steps=80, batch_size=16, run_dir=str(tmp_path / precision), precision=precision, **OPTIONS
        )
        losses = [e["loss"] for e in read_events(tmp_path / precision) if e["event"] == "step"]
        assert result.loss < 0.7 * losses[0]
        results[precision] = (result.metrics["eval_loss"], sum(losses[-10:]) / 10)
        assert notices(tmp_path / precision)[:1] == ([] if precision == "fp32" else [precision])
    print(results)
    for precision in ("bf16", "fp16"):
        assert results[precision] != results["fp32"]  # it does compute otherwise
        assert results[precision] == pytest.approx(results["fp32"], rel=0.02)


def own_loop(run_dir: Path, around: Any = None, **options: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Train a loop of one's own, two parts a step; give what it saw, and the weights."""
    seen: list[Any] = []
    x, y = made_up(20, dtype=torch.float32)
    with instep.start(run_dir=str(run_dir), accumulate=2, threads=1, **options) as run:
        model, _ = run.prepare(nn.Linear(6, 3), lambda params: torch.optim.SGD(params, lr=0.5))
        with around or contextlib.nullcontext():
            for step in run.steps((x, y), batch_size=10, steps=4):
                for rows, labels in step.shards():
                    out = model(rows)
                    step.backward(F.cross_entropy(out, labels))
                    seen += [out.dtype, torch.is_autocast_enabled("cpu"), model.weight.grad.dtype]
                seen.append(torch.is_autocast_enabled("cpu"))
                step.finish()

        def is_half(model: Any, batch: Any) -> dict[str, Any]:
            return {"half": [float(model(batch[0]).dtype == torch.bfloat16)] * len(batch[0])}

        scores = run.evaluate(is_half, (x, y))
        return [*seen, scores["half"]], [p.detach().clone() for p in model.parameters()]


def test_a_loop_of_ones_own_computes_in_it_too(tmp_path: Path) -> None:
    seen, _ = own_loop(tmp_path, precision="bf16")
    assert seen == ([torch.bfloat16, True, torch.float32] * 2 + [False]) * 4 + [1.0]
    with (
        pytest.raises(ZeroDivisionError),
        instep.start(run_dir=str(tmp_path / "b"), precision="bf16", threads=1) as run,
    ):
        run.prepare(nn.Linear(6, 3), lambda params: torch.optim.SGD(params, lr=0.5))
        for step in run.steps(made_up(20, dtype=torch.float32)):
            for _ in step.shards():
                raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")


def test_weights_are_cast_anew_for_each_part(tmp_path: Path) -> None:
    """A user's own autocast around the loop keeps what it has cast, also from before an update."""
    _, expected = own_loop(tmp_path / "a", precision="bf16")
    _, results = own_loop(tmp_path / "b", torch.autocast("cpu", torch.bfloat16), precision="bf16")
    assert all(map(torch.equal, results, expected))


def test_the_backward_pass_is_outside_of_autocast(tmp_path: Path) -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad

    with instep.start(run_dir=str(tmp_path), precision="bf16", threads=1) as run:
        model, _ = run.prepare(nn.Linear(6, 3), lambda params: torch.optim.SGD(params, lr=0.5))
        for step in run.steps(made_up(20, dtype=torch.float32), batch_size=10, steps=1):
            for x, y in step.shards():
                step.backward(F.cross_entropy(Look.apply(model(x)), y))
            step.finish()
    assert seen == [False]


def test_a_loss_in_half_precision_is_scaled_as_a_wide_one(tmp_path: Path) -> None:
    """65536 is more than float16 holds."""
    with instep.start(run_dir=str(tmp_path), precision="fp16", threads=1) as run:
        model, _ = run.prepare(nn.Linear(6, 3), lambda params: torch.optim.SGD(params, lr=0.5))
        for step in run.steps(made_up(20, dtype=torch.float32), batch_size=10, steps=3):
            for x, _ in step.shards():
                loss = model(x).sin().mean()
                assert loss.dtype == torch.float16
                step.backward(loss)
            record = step.finish()
    assert record.skipped is False


class TestLossScale:
    def test_history(self) -> None:
        scale = LossScale()
        for _ in range(1999):
            scale.end_step(good=True, overflowed=False, weight=None)
        assert scale.factor == 2.0**16
        scale.end_step(good=True, overflowed=False, weight=None)
        assert scale.factor == 2.0**17
        scale.end_step(good=True, overflowed=True, weight=None)
        assert (scale.factor, scale.num_skipped) == (2.0**16, 1)
        for _ in range(1999):
            scale.end_step(good=True, overflowed=False, weight=None)
        other = LossScale()
        other.restore(json.loads(json.dumps(scale.state())))
        other.end_step(good=True, overflowed=False, weight=None)
        assert (other.factor, other.num_skipped) == (2.0**17, 1)

    def test_a_step_that_nan_refused_teaches_nothing(self) -> None:
        scale = LossScale()
        scale.end_step(good=False, overflowed=False, weight=None)
        assert scale.state() == LossScale().state()

    def test_weights_count_by_the_next_power_of_two(self) -> None:
        scale = LossScale()
        scale.end_step(good=True, overflowed=True, weight=1000.0)  # nobody could know how large the loss is
        assert (scale.value, scale.factor, scale.num_skipped) == (2.0**16, 2.0**6, 1)
        scale.end_step(good=True, overflowed=True, weight=1024.0)
        assert (scale.value, scale.factor, scale.num_skipped) == (2.0**15, 2.0**5, 2)

    def test_said_first_and_when_it_becomes_frequent(self) -> None:
        scale, said = LossScale(), []
        for step in range(1, 400):
            overflowed = step == 3 or step > 200
            scale.end_step(good=True, overflowed=overflowed, weight=None)
            if overflowed and (text := scale.complaint(step)):
                said.append((step, text))
        assert [step for step, _ in said] == [3, 210]
        assert "step 3 overflowed" in said[0][1]
        assert "10 of the last 10 steps" in said[1][1]

    def test_a_scale_that_cannot_be_the_cause_is_not_blamed(self) -> None:
        scale = LossScale()
        for _ in range(32):
            assert scale.may_shrink
            scale.end_step(good=True, overflowed=True, weight=None)
        assert not scale.may_shrink
