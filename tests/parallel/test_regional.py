"""Regional compilation: one block's code for all blocks, the same answer as uncompiled, and no rank that goes alone."""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights
from instep.core.errors import CompileError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.parallel.batch_context import BatchContext
from instep.parallel.dropout import replace_dropout
from instep.parallel.noise_patches import noise_by_row
from instep.parallel.regional import compile_blocks
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import Small, made_up

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")  # torch warns of what it does itself
    for text in (".*should not be instantiated", "`torch.jit.script_method` is deprecated", "The .grad attribute of a")
]
_torch_compile = torch.compile
STEPS = 5


class Compiler:
    """Splits a graph into forward and backward pass as torch's own compiler does, runs both as they are, and counts."""

    def __init__(self, fails: str = "") -> None:
        self.num = 0
        self._fails = fails

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num += 1
        if self._fails == "forward":
            raise RuntimeError("there is no compiler here\nand a second line")
        backward = _broken if self._fails == "backward" else _as_it_is
        return aot_autograd(
            fw_compiler=_as_it_is, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition
        )(graph, inputs)


def _as_it_is(graph: Any, inputs: Any) -> Any:
    return make_boxed_func(graph.forward)


def _broken(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("the backward pass cannot be compiled")


def use(compiler: Any) -> Any:
    """Compile by a compiler of ours in this process; torch's own takes many seconds."""
    torch._dynamo.reset()
    torch.compile = functools.partial(_torch_compile, backend=compiler)
    return compiler


@pytest.fixture
def compiler() -> Any:
    yield use(Compiler())
    torch.compile = _torch_compile
    torch._dynamo.reset()


class Block(nn.Module):
    """Draws noise in two ways, or one; `factor` is a Python number that may differ between blocks."""

    def __init__(self, factor: int, draws: bool, width: int = 8) -> None:
        super().__init__()
        self.factor, self.draws = factor, draws
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.tanh(self.inner(self.norm(x)) * self.factor))
        return x + (F.dropout(h, 0.1, self.training) if self.draws else h)


class Deep(nn.Module):
    def __init__(self, factors: tuple[int, ...] = (1, 1, 2, 1), draws: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block(factor, draws) for factor in factors)
        self.head = nn.Linear(8, 3)
        self.repeats = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.repeats else block(h)
        return self.head(h)


@dataclass(kw_only=True)
class Task(Small):
    flat: bool = False
    """Without repeated blocks."""
    draws: bool = True
    """Draw noise with torch's functions, too: a pipeline does not count those draws by stage."""

    def model(self) -> nn.Module:
        if self.flat:
            return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 3)).double()
        return Deep(draws=self.draws).double()

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        output = model(x + torch.rand_like(x) if self.draws else x)
        loss = F.cross_entropy(output, y)
        if self.draws:  # before, within and after the model; the last is not by row, and counts nothing
            loss = loss + (output * torch.rand_like(output)).mean() + 0 * torch.multinomial(torch.ones(3), 1).sum()
        return loss


def in_process(model: nn.Module, context: BatchContext, rows: int = 4, compiles: bool = True) -> list[torch.Tensor]:
    """Run one step of a model; return its output and gradients."""
    model.zero_grad()
    context.compiles = compiles
    context.begin_step(3)
    context.begin_part(0, rows, False)
    output = model(made_up(rows)[0])
    output.square().sum().backward()
    context.end_part()
    return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def small_model(**options: Any) -> tuple[Any, BatchContext]:
    torch.manual_seed(1)
    context = BatchContext(torch.device("cpu"), 7)
    model = replace_dropout(Deep(**options).double(), context)
    compile_blocks(list(model.blocks), context)
    return model, context


def assert_close(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(actual) == len(wanted)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_blocks_share_one_code_and_draw_their_own_noise(compiler: Any) -> None:
    model, context = small_model(factors=(1,) * 10)
    with noise_by_row(context, compiles=True):
        wanted = in_process(model, context, compiles=False)
        assert compiler.num == 0
        assert_close(in_process(model, context), wanted)
        assert compiler.num == 1  # else it would be ten, and after eight dynamo gives up
        assert list(model.state_dict()) == list(Deep(factors=(1,) * 10).state_dict())


def test_what_differs_between_blocks_counts(compiler: Any) -> None:
    model, context = small_model()
    with noise_by_row(context, compiles=True):
        assert_close(in_process(model, context), in_process(model, context, compiles=False))
    assert compiler.num == 2


def test_evaluation_is_not_compiled(compiler: Any) -> None:
    model, context = small_model()
    context.compiles = True
    model(made_up(4)[0]).sum().backward()  # no part of a step
    with torch.no_grad():
        in_process_without_gradient(model, context)
    assert compiler.num == 0


def in_process_without_gradient(model: nn.Module, context: BatchContext) -> None:
    context.begin_part(0, 4, False)
    model(made_up(4)[0])
    context.end_part()


def test_a_users_checkpoint_repeats_the_noise(compiler: Any) -> None:
    model, context = small_model()
    with noise_by_row(context, compiles=True):
        wanted = in_process(model, context, compiles=False)
        model.repeats = True
        assert_close(in_process(model, context), wanted)
    assert compiler.num == 0


def train(world: World, run_dir: Path, task: Task | None = None, **options: Any) -> dict[str, Any]:
    """Train, and return the losses, the weights by name, and the notices."""
    given = {"steps": STEPS, "batch_size": 12, "threads": 1, "precision": "fp32", "eval_every": "never", "seed": 3}
    spec = TrainSpec(**given | options)
    with process_settings(spec, world.world_size):
        worker_main(world, task or Task(), spec, RunDirectory(run_dir))
    world.barrier()
    events = read_events(run_dir)
    return {
        "losses": [e["loss"] for e in events if e["event"] == "step"],
        "weights": {name: tensor.tolist() for name, tensor in load_weights(run_dir).items()},
        "notices": [e["text"] for e in events if e["event"] == "notice"],
    }


def on_ranks(world: World, scratch: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train compiled and continue uncompiled; then a model without blocks. Return both, and what was compiled."""
    here, compiler, task = Path(scratch), use(Compiler()), Task(draws="pp" not in str(options))
    train(world, here / "deep", task, steps=4, compile=True, **options)
    num = compiler.num
    deep = train(world, here / "deep", task, **options)
    assert compiler.num == num
    flat = train(world, here / "flat", Task(flat=True, draws=False), steps=3, compile=True, **options)
    return {"deep": deep | {"num": num}, "flat": flat | {"num": compiler.num - num}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any) -> dict[Any, Any]:
    scratch = tmp_path_factory.mktemp("alone")
    with World.join(Place()) as world:
        return {
            True: train(world, scratch / "drawing"),
            False: train(world, scratch / "deep", Task(draws=False)),
            "flat": train(world, scratch / "flat", Task(flat=True, draws=False), steps=3),
        }


WAYS = [
    pytest.param(2, {"strategy": "fsdp"}, id="fsdp"),
    pytest.param(2, {"mesh": "pp=2", "microbatches": 3}, id="pipeline"),
    pytest.param(4, {"mesh": "dp=2,fsdp=2"}, id="dp×fsdp", marks=pytest.mark.slow),
    pytest.param(4, {"mesh": "dp=2,pp=2"}, id="dp×pipeline", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world_size", "options"), WAYS)
def test_the_same_answer_as_one_uncompiled_process(
    world_size: int, options: dict[str, Any], alone: dict[str, Any], tmp_path: Path
) -> None:
    by_rank = run_ranks(on_ranks, world_size, str(tmp_path), options)
    first = by_rank[0]
    for name, wanted in (("deep", alone["pp" not in str(options)]), ("flat", alone["flat"])):
        assert first[name]["losses"] == pytest.approx(wanted["losses"], rel=1e-12), name
        assert first[name]["weights"].keys() == wanted["weights"].keys()
        for key, values in wanted["weights"].items():
            torch.testing.assert_close(torch.tensor(first[name]["weights"][key]), torch.tensor(values))
    # Of 43 samples in batches of 12, the last batch is not compiled. Of four blocks two differ. The loss is compiled
    # up to the model and from there on; in a pipeline the last stage has it, without noise.
    for rank, each in enumerate(by_rank):
        num_of_loss = 2 if "pp" not in str(options) else int(rank >= world_size // 2)
        assert 0 < each["deep"]["num"] - num_of_loss <= 2, each["deep"]["num"]
        assert 0 < each["flat"]["num"] <= 2 + num_of_loss
    assert any("compiled 4 Block" in text for text in first["deep"]["notices"])
    if "pp" not in str(options):  # found by a pass before the first step, which is compiled, too
        assert any("loss draws random numbers (multinomial)" in text for text in first["deep"]["notices"])
    assert any("fp32, compiled as a whole" in text for text in first["flat"]["notices"])


def failing(world: World, scratch: str, options: dict[str, Any], where: str) -> str:
    use(Compiler(fails=where))
    try:
        train(world, Path(scratch), compile=True, **options)
    except CompileError as error:
        return str(error)
    return ""


def test_a_compiler_that_fails_ends_the_run_on_every_rank(tmp_path: Path) -> None:
    for message in run_ranks(failing, 2, str(tmp_path), {"strategy": "fsdp"}, "forward"):
        assert "--compile: compiled code failed. RuntimeError: there is no compiler here\n" in message
        assert "cannot continue uncompiled by itself" in message
        assert "second line" not in message


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_backward_pass_that_cannot_be_compiled(strategy: str, tmp_path: Path) -> None:
    options = {"strategy": strategy}
    if strategy == "fsdp":
        messages = run_ranks(failing, 2, str(tmp_path), options, "backward")
        assert all("the backward pass cannot be compiled" in message for message in messages)
    else:  # the other stage waits for this one's gradient, until the connection is lost
        with pytest.raises(AssertionError, match=r"onnection|PeerLost"):
            run_ranks(failing, 2, str(tmp_path), options, "backward")


def by_torchs_compiler(world: World, scratch: str, options: dict[str, Any]) -> dict[str, Any]:
    return train(world, Path(scratch), Task(draws=options["strategy"] == "fsdp"), compile=True, **options)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_by_torchs_own_compiler(strategy: str, alone: dict[str, Any], tmp_path: Path) -> None:
    first = run_ranks(by_torchs_compiler, 2, str(tmp_path), {"strategy": strategy}, timeout_s=250)[0]
    assert first["losses"] == pytest.approx(alone[strategy == "fsdp"]["losses"], rel=1e-9)
