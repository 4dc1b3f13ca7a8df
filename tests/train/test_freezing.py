"""Layers that are frozen in the course of a run: the same at any world size, under any strategy, and after a kill."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights, weights_sha256
from instep.core.errors import TaskError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.events.read import read_events
from instep.parallel.overlap import Overlap
from instep.train.worker import open_run, process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks
from tasks import made_up

STEPS = 9
PER_EPOCH = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.never = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.backbone(x))) * self.never


@dataclass(kw_only=True)
class Thaws(instep.Task):
    """The first epoch trains the head, the second also the upper block, the third all but the head's bias."""

    dtype: str = "float64"
    rule: str = "thaw"
    dies_at: int = 0

    def model(self) -> nn.Module:
        return Net().to(getattr(torch, self.dtype))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)

    def train_data(self) -> Any:
        return made_up(24, dtype=getattr(torch, self.dtype))

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    def frozen(self, step: int, epoch: int) -> Any:
        return {
            "thaw": [["backbone", "norm*"], ["backbone.0", "backbone.1.*", "norm.bias"], ["head.bias", "never"]][epoch],
            "steps": ["head"] if 3 <= step < 6 else [],
            "never": (),
            "text": "head",
            "unknown": ["tail.*"],
            "all": ["*"],
        }[self.rule]

    def on_step(self, record: Any) -> None:
        if record.step == self.dies_at:
            raise KeyboardInterrupt


def train(world: World, run_dir: str, options: dict[str, Any], fields: dict[str, Any]) -> tuple[Any, ...]:
    """Train; return the losses and the hashes of all checkpoints' weights."""
    spec = TrainSpec(
        **{"batch_size": 8, "epochs": 3, "seed": 5, "threads": 1, "save_every": "1epoch", "keep": 9, **options}
    )
    with process_settings(spec, world.world_size):
        worker_main(world, Thaws(**fields), spec, RunDirectory(Path(run_dir)))
    world.barrier()
    losses = {event["step"]: event["loss"] for event in read_events(Path(run_dir)) if event["event"] == "step"}
    hashes = [weights_sha256(checkpoint) for checkpoint in saved(Path(run_dir)).values()]
    return list(losses.values()), hashes


def saved(run_dir: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Return the weights after each epoch."""
    names = [f"step-{step:08d}" for step in range(PER_EPOCH, STEPS + 1, PER_EPOCH)]
    return {number: load_weights(run_dir / "checkpoints" / name) for number, name in enumerate(names, start=1)}


def alone(run_dir: Path, options: dict[str, Any] | None = None, **fields: Any) -> tuple[Any, ...]:
    return train(World.join(Place()), str(run_dir), options or {}, fields)


def by_hand() -> list[dict[str, torch.Tensor]]:
    """Thaw layers as in a plain loop; return the weights after each epoch."""
    with instep.start(seed=5, run_dir="by_hand", save_every="never", threads=1) as run:
        task = Thaws()
        model, _ = run.prepare(task.model(), task.optimizer)
        states = []
        for step in run.steps(task.train_data(), batch_size=8, epochs=3):
            for name, p in model.named_parameters():
                first = name.startswith(("backbone", "norm"))
                second = name.startswith(("backbone.0", "backbone.1", "norm.bias"))
                p.requires_grad_(name != "never" and not [first, second, name == "head.bias"][step.epoch])
            step.compute(model, task.loss)
            step.finish()
            if step.ends_epoch:
                states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return states


def test_as_a_loop_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses, _ = alone(tmp_path / "task")
    for state, expected in zip(saved(tmp_path / "task").values(), by_hand(), strict=True):
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert losses != alone(tmp_path / "free", rule="never")[0]


def changed(run_dir: Path) -> list[set[str]]:
    """Return the parameters that each epoch changed."""
    states = [*saved(run_dir).values()]
    names = [name for name, _ in Net().named_parameters()]
    pairs = itertools.pairwise(states)
    return [{name for name in names if not torch.equal(one[name], two[name])} for one, two in pairs]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[int, dict[str, torch.Tensor]]]:
    run_dir = tmp_path_factory.mktemp("alone")
    return alone(run_dir)[0], saved(run_dir)


def test_what_is_frozen_stays(tmp_path: Path) -> None:
    alone(tmp_path)
    upper = {"backbone.2.0.weight", "backbone.2.0.bias", "norm.weight", "head.weight", "head.bias"}
    everything = {name for name, _ in Net().named_parameters()} - {"never"}
    assert changed(tmp_path) == [upper, everything - {"head.bias"}]
    texts = [event["text"] for event in read_events(tmp_path) if event["event"] == "notice"]
    assert [text for text in texts if "frozen" in text] == [
        "from step 1 on, frozen: backbone, norm* (8 of 10 parameters)",
        "from step 4 on, frozen: backbone.0, backbone.1.*, norm.bias (5 of 10 parameters)",
        "from step 7 on, frozen: head.bias, never (1 of 10 parameters)",
    ]
    alone(tmp_path / "by step", rule="steps")
    thawed = [event["text"] for event in read_events(tmp_path / "by step") if event["event"] == "notice"]
    assert "from step 6 on, frozen: nothing" in thawed


@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("tensor", 2)])
def test_under_other_strategies(strategy: str, world_size: int, expected: Any, tmp_path: Path) -> None:
    losses, _ = run_ranks(train, world_size, str(tmp_path), {"strategy": strategy}, {})[0]
    assert losses == pytest.approx(expected[0], rel=1e-9)
    for number, state in saved(tmp_path).items():
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, expected[1][number][name], rtol=1e-9, atol=1e-9)


def compiled(world: World, run_dir: str, strategy: str) -> tuple[Any, ...]:
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # torch's own backend takes many seconds
    return train(world, run_dir, {"strategy": strategy, "compile": True}, {})


# slow: compiled[fsdp] goes red where compiled code ignores what is frozen
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_compiled(strategy: str, expected: Any, tmp_path: Path) -> None:
    losses, _ = run_ranks(compiled, 2, str(tmp_path), strategy)[0]
    assert losses == pytest.approx(expected[0], rel=1e-9)
    for name, tensor in saved(tmp_path)[3].items():
        torch.testing.assert_close(tensor, expected[1][3][name], rtol=1e-9, atol=1e-9)


def test_the_same_bits_in_exact_mode_and_after_a_kill(tmp_path: Path) -> None:
    options, fields = {"exact": True, "shards": 4}, {"dtype": "float32"}
    wanted = alone(tmp_path / "1", options, **fields)
    for world_size, strategy in ((3, "ddp"), (2, "fsdp")):
        run_dir, more = tmp_path / f"{world_size}-{strategy}", {**options, "strategy": strategy}
        assert run_ranks(train, world_size, str(run_dir), more, fields)[0] == wanted
    saving = {**options, "save_every": "1"}
    with pytest.raises(KeyboardInterrupt):
        alone(tmp_path / "killed", saving, dies_at=5, **fields)
    again = run_ranks(train, 2, str(tmp_path / "killed"), {**saving, "strategy": "fsdp"}, fields)[0]
    assert again == wanted


def thawed_under_fsdp(world: World, run_dir: str) -> list[int]:
    """Freeze before the first pass, in a loop of one's own; return how many parameters got a gradient, by epoch."""
    task, counts = Thaws(dtype="float32"), []
    spec = TrainSpec(strategy="fsdp", narrow_gather=True, precision="bf16", save_every="never", run_dir=run_dir)
    with open_run(world, spec, RunDirectory(Path(run_dir)), "loop", own_loop=True) as run:
        model, _ = run.prepare(task.model(), task.optimizer)
        run.freeze(task.frozen)
        for step in run.steps(task.train_data(), batch_size=8, epochs=3):
            step.compute(model, task.loss)
            step.finish()
            if step.ends_epoch:
                counts.append(sum(p.grad is not None for p in model.parameters()))
    return counts


def test_units_that_are_frozen_at_first_learn_their_dtype(tmp_path: Path) -> None:
    assert run_ranks(thawed_under_fsdp, 2, str(tmp_path)) == [[2, 5, 9]] * 2


def overlapped(world: World, run_dir: str, exact: bool) -> list[tuple[int, bool]]:
    """Return, after each step, how many parameters the reducer has, and whether their buckets travel in backward."""
    seen: list[tuple[int, bool]] = []
    options = {"exact": True, "shards": 4} if exact else {}
    spec = TrainSpec(batch_size=8, epochs=3, seed=5, threads=1, save_every="never", **options)

    class Longer(Thaws):
        def train_data(self) -> Any:
            return made_up(8 * 16)

    original = Overlap.arm

    def arm(self: Overlap) -> None:
        seen.append((len(self._parameters), self.is_planned))
        original(self)

    Overlap.arm = arm  # type: ignore[method-assign]
    with process_settings(spec, world.world_size):
        worker_main(world, Longer(), spec, RunDirectory(Path(run_dir)))
    return seen


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_still_travel_while_backward_runs(exact: bool, tmp_path: Path) -> None:
    seen = run_ranks(overlapped, 2, str(tmp_path), exact, apart=True)[0]
    assert [count for count, _ in seen] == [2] * 16 + [5] * 16 + [9] * 16
    for first in (0, 16, 32):
        assert [is_planned for _, is_planned in seen[first : first + 16]] == [False] + [True] * 15


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("text", r"Return a list of names: \['head'\]"),
        ("unknown", r"'tail\.\*', and no parameter or module has such a name"),
        ("all", "leaves nothing to train in step 1"),
    ],
)
def test_what_cannot_be(rule: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=words):
        alone(tmp_path, rule=rule)


def test_a_pipeline_refuses(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="with strategy=pipeline a rank knows the names of its own layers only"):
        run_ranks(train, 2, str(tmp_path / "run"), {"strategy": "pipeline"}, {})
    with instep.start(run_dir=str(tmp_path / "loop")) as run, pytest.raises(TaskError, match="there is no model yet"):
        run.freeze(lambda step, epoch: [])
