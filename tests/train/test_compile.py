"""Compiling: the same answer, no endless compilations, and a way on where it fails."""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import CompileError, NumericsError, SpecError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.train import compile as compiling
from instep.train import run
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small, made_up

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")  # torch warns of what it does itself
    for text in (".*should not be instantiated", "`torch.jit.script_method` is deprecated", "The .grad attribute of a")
]
_torch_compile = torch.compile


class Backend:
    """Counts what is compiled, and fails when told to."""

    def __init__(self, fails: Any = None, backward: bool = False) -> None:
        self.num = 0
        self._fails = fails or (lambda num: False)
        self._backward = backward

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num += 1
        if not self._fails(self.num):
            return graph.forward
        if self._backward:
            return aot_autograd(fw_compiler=_as_it_is, bw_compiler=_broken)(graph, inputs)
        raise RuntimeError("there is no compiler here\nand a second line")


def _as_it_is(graph: Any, inputs: Any) -> Any:
    return make_boxed_func(graph.forward)


def _broken(graph: Any, inputs: Any) -> Any:
    def fail(*args: Any) -> Any:
        raise RuntimeError("the backward pass cannot be computed")

    return make_boxed_func(fail)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compile by a backend of ours; torch's own takes many seconds."""
    torch._dynamo.reset()

    def use(backend: Any) -> Any:
        monkeypatch.setattr(torch, "compile", functools.partial(_torch_compile, backend=backend))
        return backend

    yield use
    torch._dynamo.reset()


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile where nobody asked for it, as on a GPU."""
    monkeypatch.setattr(run, "wants_compiling", lambda engine: True)


@dataclass(kw_only=True)
class Plain(Small):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(8, 8),
            nn.Dropout(0.1),
            nn.Linear(8, 3),
        ).double()


def train(task: Any, run_dir: Path, **options: Any) -> instep.Result:
    given = {"epochs": 3, "batch_size": 12, "threads": 1, "quiet": True, "run_dir": str(run_dir), "seed": 3}
    return instep.train(task, **given | options)


def notices(run_dir: Path) -> list[str]:
    return [e["text"] for e in read_events(run_dir) if e["event"] == "notice"]


def test_the_same_answer_and_full_batches_only(use: Any, tmp_path: Path) -> None:
    backend = use(Backend())
    plain = train(Plain(), tmp_path / "plain")
    assert backend.num == 0  # not on CPU, unless asked for
    compiled = train(Plain(), tmp_path / "compiled", compile=True)
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-12)
    assert compiled.metrics == pytest.approx(plain.metrics, rel=1e-9)
    # 43 samples: neither the last batch of 7, nor the evaluations, nor a new step's noise is compiled anew.
    assert backend.num == 1
    assert notices(tmp_path / "compiled") == ["fp32, compiled"]


def test_parts_of_other_sizes_are_compiled_once_more(use: Any, tmp_path: Path) -> None:
    backend = use(Backend())
    plain = train(Plain(), tmp_path / "plain", batch_size=13, accumulate=2)
    compiled = train(Plain(), tmp_path / "compiled", compile=True, batch_size=13, accumulate=2, epochs=3)
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-12)
    assert backend.num <= 3


FAILURES = {
    "forward": lambda: Backend(lambda num: True),
    "backward": lambda: Backend(lambda num: True, backward=True),
    "second part": lambda: Backend(lambda num: num > 1),
    "second part, backward": lambda: Backend(lambda num: num > 1, backward=True),
}


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_failure_is_told_and_the_training_goes_on_without(
    weighted: bool, where: str, use: Any, tmp_path: Path
) -> None:
    task = Weighted if weighted else Plain
    use(FAILURES[where]())
    result = train(task(), tmp_path / "found", batch_size=13, accumulate=2)
    use(Backend())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "wants_compiling", lambda engine: False)
        expected = train(task(), tmp_path / "expected", batch_size=13, accumulate=2)
    assert result.weights_sha256 == expected.weights_sha256
    assert result.loss == expected.loss
    sentences = [text for text in notices(tmp_path / "found") if "not compiled, since that failed" in text]
    assert len(sentences) == 1
    assert ("there is no compiler here" if "backward" not in where else "cannot be computed") in sentences[0]
    assert "second line" not in sentences[0]


@dataclass(kw_only=True)
class Weighted(Plain):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        weight = (1 + y).to(x.dtype)
        each = F.cross_entropy(F.dropout(model(x), 0.1), y, reduction="none")  # noise of torch's own generator, too
        return (each * weight).sum() / weight.sum(), weight.sum()


def test_a_failure_of_what_was_asked_for_is_an_error(use: Any, tmp_path: Path) -> None:
    use(Backend(lambda num: True))
    with pytest.raises(
        CompileError, match=r"cannot be compiled, though it can be computed.*no compiler here"
    ) as caught:
        train(Plain(), tmp_path, compile=True)
    assert caught.value.exit_code == 1
    assert "second line" not in str(caught.value)


class Wrong(Plain):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x[:, :3]), y)


def test_what_is_wrong_without_compiling_is_told_as_without(use: Any, tmp_path: Path) -> None:
    use(Backend())
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        train(Wrong(), tmp_path, compile=True)


class Drawing(Plain):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        noise = instep.randn_like(x) + torch.rand(x.shape, dtype=x.dtype) + torch.randint(0, 3, (len(x), 1))
        out = F.dropout(model(x + 0.1 * noise), 0.1)
        return (F.cross_entropy(out, y, reduction="none") * torch.bernoulli(torch.full_like(out[:, 0], 0.7))).mean()


def test_noise_of_ones_own_is_the_same(use: Any, tmp_path: Path) -> None:
    backend = use(Backend())
    plain = train(Drawing(), tmp_path / "plain")
    compiled = train(Drawing(), tmp_path / "compiled", compile=True)
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-12)
    assert backend.num == 1
    assert not any("random numbers" in text for text in notices(tmp_path / "compiled"))


class Noisy(Plain):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y) + 0 * torch.multinomial(torch.ones(len(x), 4), 1).sum()


def test_noise_that_is_not_ours_is_still_named(use: Any, tmp_path: Path) -> None:
    use(Backend())
    train(Noisy(), tmp_path, compile=True)
    assert [text for text in notices(tmp_path) if "test_compile.py" in text and "draws random numbers" in text]


class Bad(Plain):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y) + (model(x)[0, 0] - 1e3).log() * (x.sum() > -1e9)


def test_a_nan_is_still_found(use: Any, tmp_path: Path) -> None:
    use(Backend())
    with pytest.raises(NumericsError, match="It begins in the loss function: the model's output is finite"):
        train(Bad(), tmp_path, compile=True)


def own_loop(run_dir: Path, **options: Any) -> list[float]:
    losses = []
    torch.manual_seed(1)
    with instep.start(run_dir=str(run_dir), threads=1, **options) as run:
        model, _ = run.prepare(Plain().model(), lambda params: torch.optim.SGD(params, lr=0.1))
        for step in run.steps(made_up(43), batch_size=12, epochs=2):
            for x, y in step.shards():
                step.backward(F.cross_entropy(model(x), y))
            losses.append(step.finish().loss)
        run.evaluate(lambda model, batch: {"score": model(batch[0]).sum(1)}, made_up(23))
    return losses


def test_a_loop_of_ones_own(use: Any, tmp_path: Path) -> None:
    backend = use(Backend())
    plain = own_loop(tmp_path / "plain")
    assert own_loop(tmp_path / "compiled", compile=True) == pytest.approx(plain, rel=1e-12)
    assert backend.num == 1
    use(Backend(lambda num: True))
    with pytest.raises(CompileError, match="no compiler here"):
        own_loop(tmp_path / "failed", compile=True)


@pytest.mark.usefixtures("by_default")
def test_a_loop_of_ones_own_goes_on_without(use: Any, tmp_path: Path) -> None:
    use(Backend(lambda num: True))
    result = own_loop(tmp_path / "found")
    assert [text for text in notices(tmp_path / "found") if "not compiled, since that failed" in text]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "wants_compiling", lambda engine: False)
        assert own_loop(tmp_path / "expected") == result


def exact(world: World, run_dir: str) -> str:
    torch.compile = functools.partial(_torch_compile, backend=Backend())
    spec = TrainSpec(steps=5, batch_size=11, exact=True, shards=4, compile=True, precision="bf16", threads=1)
    with process_settings(spec, world.world_size):
        return worker_main(world, Shallow(), spec, RunDirectory(Path(run_dir))).weights_sha256


class Shallow(Small):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))

    def train_data(self) -> Any:
        return made_up(43, dtype=torch.float32)

    def eval_data(self) -> Any:
        return None


def test_exact_mode_compiled_has_the_bits_of_one(use: Any, tmp_path: Path) -> None:
    del use  # it puts torch.compile back
    try:
        alone = exact(World.join(Place()), str(tmp_path / "1"))
    finally:
        torch.compile = _torch_compile
    assert set(run_ranks(exact, 2, str(tmp_path / "2"))) == {alone}


def test_compiled_and_recomputed_is_refused() -> None:
    with pytest.raises(SpecError, match="recomputed blocks are not compiled"):
        TrainSpec(compile=True, recompute=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.timeout(300)
def test_by_torchs_own_compiler(tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        plain = train(Shallow(), tmp_path / f"plain-{precision}", precision=precision)
        compiled = train(Shallow(), tmp_path / f"compiled-{precision}", precision=precision, compile=True)
        assert compiled.loss == pytest.approx(plain.loss, rel=1e-5 if precision == "fp32" else 0.02)
        assert notices(tmp_path / f"compiled-{precision}")[0].startswith(f"{precision}")


def test_what_is_compiled_unless_it_is_said() -> None:
    """On CPU nothing; the rest needs a GPU to be true, and is tested there."""
    with World.join(Place()) as world:
        from instep.train.engine import Engine

        assert not compiling.wants_compiling(Engine(world, TrainSpec(precision="fp32")))
        assert compiling.wants_compiling(Engine(world, TrainSpec(precision="fp32", compile=True)))
        assert not compiling.wants_compiling(Engine(world, TrainSpec(precision="fp32", compile=False)))
