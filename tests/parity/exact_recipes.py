"""The trainings whose bits must not depend on the world size in exact mode."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.train.task import Task
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from recipes import Conv

NUM_TOKENS, LENGTH = 11, 6


class Lstm(nn.Module):
    """Two layers, with the dropout between them that torch draws by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 10, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x.view(-1, 6, 6))[0][:, -1])


class Tied(nn.Module):
    """A language model whose output is its embedding, with functional dropout and fused attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, NUM_TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(F.dropout(self.block(self.embed(tokens)), 0.1, self.training))


class Bag(nn.Module):
    """A large table of which a step uses few rows; its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 8, sparse=True)
        self.never = nn.Linear(2, 2)
        self.sometimes = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        h = self.table(numbers).mean(1)
        if int(numbers.sum()) % 2:  # used by some shards only
            h = h + self.sometimes(h)
        return self.head(h)


class Average(nn.Linear):
    """Follows its inputs with a moving average, in place, and without a trace; counts its passes, by another tensor
    each time, and its calls, those of an evaluation too.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("average", torch.zeros(sizes[0]))
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("silent", torch.zeros(sizes[0]))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)
            self.passes = self.passes + 1
            self.silent.data.lerp_(x.detach().mean(0), 0.2)
        self.calls += 1
        return super().forward(x - self.average + self.silent) * (1 + 0.01 * self.passes + 0.001 * self.calls)


def with_buffers() -> nn.Module:
    """Make a model whose forward pass leaves something in its buffers."""
    spectral = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(spectral(nn.Linear(36, 24)), nn.Tanh(), Average(24, 12), nn.BatchNorm1d(12), nn.Linear(12, 5))


BUFFERED = {"buffers": with_buffers}
MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(36, 24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 5)),
    "conv": Conv,
    "lstm": Lstm,
    "tied": Tied,
    "bag": Bag,
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=2e-3, fused=True),
}


class Langevin(torch.optim.SGD):
    """Draws noise in its step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p), alpha=1e-3)


OPTIMIZERS_TOO = {"langevin": lambda params: Langevin(params, lr=0.05)}
SHARDS = (12, 16)
SHAPES = ((49, 23, 1), (61, 24, 1), (50, 32, 2), (47, 13, 3))
"""Samples, batch, accumulate: the first has a last batch of 3, fewer shards than ranks."""
WORLDS = (2, 3, 4, 5)


@dataclass(frozen=True)
class Case:
    """One training."""

    model: str
    optimizer: str
    shards: int
    shape: tuple[int, int, int]
    bf16: bool = False
    clip_norm: float | None = None
    compiled: bool = False

    def __str__(self) -> str:
        extra = "-bf16" * self.bf16 + "-clip" * (self.clip_norm is not None) + "-compiled" * self.compiled
        return f"{self.model}-{self.optimizer}-{self.shards}-{'x'.join(map(str, self.shape))}{extra}"


@dataclass(kw_only=True)
class Recipe(Task):
    model_name: str
    optimizer_name: str
    num_samples: int
    bf16: bool = False
    compiled: bool = False

    def model(self) -> nn.Module:
        model = (MODELS | BUFFERED)[self.model_name]()
        if self.compiled:
            model.compile()
        return model

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return (OPTIMIZERS | OPTIMIZERS_TOO)[self.optimizer_name](params)

    def scheduler(self, optimizer: Any, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=num_steps + 1)

    def train_data(self) -> Any:
        return self._made_up(self.num_samples, seed=1)

    def eval_data(self) -> Any:
        return self._made_up(37, seed=2)

    def loss(self, model: Any, batch: Any) -> Any:
        with torch.autocast(batch["x"].device.type, torch.bfloat16, enabled=self.bf16):
            out = model(batch["x"])
        if self.model_name != "tied":
            return F.cross_entropy(out.float(), batch["y"])
        each = F.cross_entropy(out.float().flatten(0, 1), batch["x"].roll(-1, 1).flatten(), reduction="none")
        mask = (batch["x"] % 4 != 0).flatten().float()  # tokens count, and their number differs by shard
        return (each * mask).sum() / mask.sum(), mask.sum()

    def metrics(self, model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        return {"score": out.float().flatten(1).std(1)}

    def _made_up(self, count: int, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = {
            "tied": lambda: torch.randint(0, NUM_TOKENS, (count, LENGTH), generator=generator),
            "bag": lambda: torch.randint(0, 500, (count, 4), generator=generator),
        }.get(self.model_name, lambda: torch.randn(count, 36, generator=generator))()
        return {"x": x, "y": torch.randint(0, 5, (count,), generator=generator)}


def train_case(world: World, case: Case, steps: int = 7) -> dict[str, Any]:
    """Train one case as a rank, and give all that is compared."""
    num_samples, batch_size, accumulate = case.shape
    task = Recipe(
        model_name=case.model,
        optimizer_name=case.optimizer,
        num_samples=num_samples,
        bf16=case.bf16,
        compiled=case.compiled,
    )
    spec = TrainSpec(
        steps=steps,
        batch_size=batch_size,
        accumulate=accumulate,
        clip_norm=case.clip_norm,
        exact=True,
        shards=min(case.shards, batch_size),
        eval_every="3",
        save_every="never",
        seed=5,
        precision="fp32",
    )
    with tempfile.TemporaryDirectory() as scratch, process_settings(spec, world.world_size):
        run_dir = Path(world.broadcast_object(scratch))
        result = worker_main(world, task, spec, RunDirectory(run_dir))
        world.barrier()
        records = [e for e in read_events(run_dir) if e["event"] == "step"]
        notices = [e["text"] for e in read_events(run_dir) if e["event"] == "notice"]
        world.barrier()
    return {
        "losses": [e["loss"] for e in records],
        "lrs": [e["lr"] for e in records],
        "grad_norms": [e.get("grad_norm") for e in records],
        "metrics": result.metrics,
        "sha256": result.weights_sha256,
        "notices": notices,
    }


def train_cases(world: World, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """Train several, one after the other: one launch for all of them."""
    return {case: train_case(world, case) for case in cases}


def all_cases() -> list[Case]:
    """Every combination."""
    return [Case(*each) for each in itertools.product(MODELS, OPTIMIZERS, SHARDS, SHAPES)]


def covering(strength: int) -> list[tuple[Case, int]]:
    """Choose few cases with a world each, such that any values of so many factors meet."""
    factors = [list(MODELS), list(OPTIMIZERS), list(SHARDS), list(SHAPES), list(WORLDS)]
    meetings = {row: set(itertools.combinations(enumerate(row), strength)) for row in itertools.product(*factors)}
    missing = set().union(*meetings.values())
    chosen = []
    while missing:
        best = max(meetings, key=lambda row: len(meetings[row] & missing))
        missing -= meetings[best]
        chosen.append((Case(*best[:4]), best[4]))
    return chosen
