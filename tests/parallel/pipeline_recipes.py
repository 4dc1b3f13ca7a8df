"""The trainings whose answer must not depend on whether a pipeline makes them."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.train.task import Task
from instep.train.worker import worker_main
from instep.world.world import World

VOCABULARY, LENGTH, WIDTH = 11, 5, 12


def mlp() -> nn.Module:
    """A plain chain, each layer of another width."""
    widths = [LENGTH * 3, 24, 20, 18, 16, 14, 12, 10]
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(LENGTH, widths[0]), nn.Tanh(), nn.Dropout(0.2)]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(widths[-1], VOCABULARY))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        h = F.dropout(F.scaled_dot_product_attention(q, k, v, is_causal=True), 0.1, self.training)
        return x + self.drop(self.out(h))


class Tied(nn.Module):
    """A transformer whose head is its embedding; one dropout is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block() for _ in range(7))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = self.drop(self.embed(x) + self.positions)
        for block in self.blocks:
            h = block(h)
            if mask is not None:
                h = h * mask[:, :, None]
        return self.head(self.drop(self.norm(h))) * self.scale


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
            nn.Conv1d(4, 4, 3),
            nn.BatchNorm1d(4),
        )
        self.head = nn.Linear(4 * (LENGTH - 2), VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x[:, None, :]).relu().flatten(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(LENGTH, LENGTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Nested(nn.Module):
    """Its blocks are inside of a module, and it asserts something of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(LENGTH, 2)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        rows, length = x.shape
        assert length <= LENGTH, "too long"
        out = self.head(self.encoder(x)).view(rows, 2)
        return out if targets is None else out - targets


MODELS = {"mlp": mlp, "tied": Tied, "masked": Tied, "conv": Conv}


@dataclass(frozen=True)
class Case:
    """One training; batches and microbatches seldom come out. The third batch of 33 samples is a single one."""

    model: str
    schedule: str = "1f1b"
    num_samples: int = 33
    batch_size: int = 16
    accumulate: int = 1
    microbatches: int | None = None
    weighted: bool = False
    clip_norm: float | None = None
    steps: int = 5

    def __str__(self) -> str:
        extra = ["weighted"] * self.weighted + [f"accumulate{self.accumulate}"] * (self.accumulate > 1)
        return "-".join([self.model, self.schedule, *extra, *(["clip"] if self.clip_norm else [])])

    @property
    def on_one(self) -> Case:
        """What one process does for the same answer; BatchNorm's statistics cover a microbatch."""
        if self.model == "conv":
            assert self.accumulate == 1
            return replace(self, schedule="1f1b", microbatches=None, accumulate=self.microbatches or 1)
        return replace(self, schedule="1f1b", microbatches=None)


@dataclass(kw_only=True)
class Recipe(Task):
    case: Case
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def is_language(self) -> bool:
        return self.case.model in ("tied", "masked")

    def model(self) -> nn.Module:
        return MODELS[self.case.model]().double()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        decayed = [p for name, p in params.named if name.endswith("weight")]
        rest = [p for name, p in params.named if not name.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=3e-3)

    def train_data(self) -> Any:
        return self._data(self.case.num_samples, 1)

    def eval_data(self) -> Any:
        return self._data(21, 2)

    def _data(self, count: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)
        if self.is_language:
            return {"x": tokens[:, :-1], "y": tokens[:, 1:], "index": torch.arange(count)}
        x = torch.randn(count, LENGTH, generator=generator, dtype=torch.float64)
        return {"x": x, "y": tokens[:, 0], "index": torch.arange(count)}

    def _each(self, model: Any, batch: Any) -> torch.Tensor:
        """The loss of each sample."""
        named = {"mask": (batch["x"] != 3).double()} if self.case.model == "masked" else {}
        out = model(batch["x"], **named)
        losses = F.cross_entropy(out.flatten(0, -2), batch["y"].flatten(), reduction="none")
        return losses.view(len(batch["x"]), -1).mean(1)

    def loss(self, model: Any, batch: Any) -> Any:
        each = self._each(model, batch)
        if not self.case.weighted:
            return each.mean()
        mask = (batch["index"] % 3 == 0).double()  # many microbatches have weight 0, and a mean of 0/0
        return (each * mask).sum() / mask.sum(), mask.sum()

    def metrics(self, model: Any, batch: Any) -> Any:
        return {"perplexity": self._each(model, batch).exp()}


class Keeper:
    """A witness that keeps the parameters that a rank ends with."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.state: dict[str, torch.Tensor] = {}

    def begin(self, model: nn.Module) -> None:
        self.model = model

    def part(self, *_: Any) -> None: ...

    def gradients(self, *_: Any) -> None: ...

    def finished(self, *_: Any) -> None: ...

    def ended(self, _: Any) -> None:
        assert self.model is not None
        self.state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def train_case(world: World, case: Case, mesh: str | None) -> dict[str, Any]:
    """Train one case as a rank, and give all that is compared."""
    if mesh is None:
        case = case.on_one
    spec = TrainSpec(
        steps=case.steps,
        batch_size=case.batch_size,
        accumulate=case.accumulate,
        clip_norm=case.clip_norm,
        mesh=mesh,
        schedule=case.schedule,  # type: ignore[arg-type]
        microbatches=case.microbatches,
        eval_every="never",
        save_every="never",
        seed=5,
        threads=1,
    )
    keeper = Keeper()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(world.broadcast_object(scratch))
        result = worker_main(world, Recipe(case=case), spec, RunDirectory(run_dir), witness=keeper)  # type: ignore[arg-type]
        world.barrier()
        events = list(read_events(run_dir))
        world.barrier()
    steps = [e for e in events if e["event"] == "step"]
    return {
        "losses": [e["loss"] for e in steps],
        "grad_norms": [e.get("grad_norm") for e in steps],
        "metrics": result.metrics,
        "loss": result.loss,
        "state": keeper.state,
        "notices": [e["text"] for e in events if e["event"] == "notice"],
        "num_parameters": next(e["num_parameters"] for e in events if e["event"] == "plan"),
    }


def train_cases(world: World, cases: list[Case], mesh: str | None) -> dict[Case, dict[str, Any]]:
    """Train several, one after the other: one launch for all of them."""
    return {case: train_case(world, case, mesh) for case in cases}
