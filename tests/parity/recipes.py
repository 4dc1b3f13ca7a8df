"""The trainings whose answer must not depend on the world size, and what is recorded of them."""

from __future__ import annotations

import itertools
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.checkpoint.weights import load_weights
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.train.task import Task
from instep.train.worker import worker_main
from instep.world.world import World

STEPS = 30


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            nn.Conv2d(6, 4, 3),
            nn.BatchNorm2d(4),
        )
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(x.view(-1, 1, 6, 6)).relu().flatten(1)))


class Transformer(nn.Module):
    """Two blocks with dropout modules; one of them is used twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.embed(x.view(-1, 6, 6)))
        for qkv, out, norm in zip(self.qkv, self.out, self.norm, strict=True):
            q, k, v = qkv(norm(h)).chunk(3, dim=-1)
            h = h + self.drop(out(F.scaled_dot_product_attention(q, k, v)))
        return self.head(h.mean(1))


class Relu(nn.BatchNorm1d):
    """A BatchNorm with a forward pass of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class Odd(nn.Module):
    """What people also write: a BatchNorm subclass, a dropout registered twice, one on time-first activations."""

    def __init__(self) -> None:
        super().__init__()
        drop = nn.Dropout(0.3)
        self.body = nn.Sequential(nn.Linear(6, 12), drop, Relu(12), drop)
        self.rnn = nn.RNN(12, 10)
        self.late = nn.Dropout(0.2)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, 6)  # six entries a row, flattened
        steps = self.body(rows).view(-1, 6, 12).transpose(0, 1)[:5]
        return self.head(self.late(self.rnn(steps)[0])[-1])


def _tanh_layers(width: int, count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Tanh(), nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(count)]


class TiedBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_1(x)
        q, k, v = (self.heads(project(h)) for project in (self.q_proj, self.k_proj, self.v_proj))
        values = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.o_proj(values))
        return x + self.drop(self.mlp(self.norm_2(x)))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)


class Tied(nn.Module):
    """A transformer whose head is its embedding, with blocks enough for eight stages."""

    def __init__(self, width: int = 16, num_blocks: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.blocks = nn.ModuleList(TiedBlock(width, 4) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bits = (x.view(-1, 12, 3) > 0).long()
        h = self.embed(bits[:, :, 0] + 2 * bits[:, :, 1] + 4 * bits[:, :, 2])
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)).mean(1)


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(36, 24), nn.Tanh(), nn.Linear(24, 5)),
    "conv": Conv,
    "transformer": Transformer,
    "odd": Odd,
    "tied": Tied,
    "deep": lambda: nn.Sequential(nn.Linear(36, 24), *_tanh_layers(24, 7), nn.Linear(24, 5)),
}


@dataclass(kw_only=True)
class Recipe(Task):
    model_name: str
    optimizer_name: str
    dtype: torch.dtype
    num_samples: int = 50
    weighted: bool = False
    seen: list[list[int]] = field(default_factory=list)

    def model(self) -> nn.Module:
        return MODELS[self.model_name]().to(self.dtype)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(params, lr=2e-3)

    def scheduler(self, optimizer: Any, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=num_steps + 1)

    def train_data(self) -> Any:
        return made_up(self.num_samples, self.dtype, seed=1)

    def eval_data(self) -> Any:
        return made_up(37, self.dtype, seed=2)

    def loss(self, model: Any, batch: Any) -> Any:
        if torch.is_grad_enabled():
            self.seen.append(batch["index"].tolist())
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        if not self.weighted:
            return each.mean()
        mask = (batch["index"] % 3 != 0).to(self.dtype)  # some parts have weight 0, and a mean of 0/0
        return (each * mask).sum() / mask.sum(), mask.sum()

    def metrics(self, model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        return {
            "accuracy": out.argmax(1) == batch["y"],
            "confidence": (out.softmax(1).amax(1), batch["index"] % 4),
        }


def made_up(count: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(count, 36, generator=generator).to(dtype),
        "y": torch.randint(0, 5, (count,), generator=generator),
        "index": torch.arange(count),
    }


@dataclass(frozen=True)
class Case:
    """One training; `batch_size` and `num_samples` never divide."""

    model: str
    optimizer: str
    dtype: str = "float64"
    num_samples: int = 50
    batch_size: int = 8
    accumulate: int = 1
    weighted: bool = False
    clip_norm: float | None = None

    def __str__(self) -> str:
        extra = ["weighted"] * self.weighted + [f"accumulate{self.accumulate}"] * (self.accumulate > 1)
        extra += ["clip"] * (self.clip_norm is not None)
        return "-".join([self.model, self.optimizer, self.dtype, *extra])


CASES = [
    *(Case(m, o, d) for m, o, d in itertools.product(list(MODELS)[:3], ("sgd", "adamw"), ("float64", "float32"))),
    # 47 samples in batches of 9: the last one has 2, fewer than the ranks of 3 and 4, in parts of 1.
    Case("mlp", "sgd", num_samples=47, batch_size=13, accumulate=3),
    Case("transformer", "adamw", num_samples=47, batch_size=13, accumulate=3),
    Case("conv", "adamw", num_samples=47, batch_size=13, accumulate=2, clip_norm=2.4),
    Case("mlp", "adamw", weighted=True, clip_norm=0.7),
    Case("odd", "adamw"),
    Case("conv", "sgd", weighted=True),
    Case("transformer", "sgd", num_samples=47, batch_size=13, accumulate=3, weighted=True),
]


def train_case(world: World, case: Case, **options: Any) -> dict[str, Any]:
    """Train one case as a rank, and give all that is compared; `options`: more of the spec."""
    task = Recipe(
        model_name=case.model,
        optimizer_name=case.optimizer,
        dtype=getattr(torch, case.dtype),
        num_samples=case.num_samples,
        weighted=case.weighted,
    )
    given = {
        "steps": STEPS,
        "batch_size": case.batch_size,
        "accumulate": case.accumulate,
        "clip_norm": case.clip_norm,
        "eval_every": "never",
        "save_every": "never",
        "seed": 5,
        "threads": 1,
        "precision": "fp32",
        "compile": False,
    }
    spec = TrainSpec(**{**given, **options})
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(world.broadcast_object(scratch))
        result = worker_main(world, task, spec, RunDirectory(run_dir))
        world.barrier()
        steps = [e for e in read_events(run_dir) if e["event"] == "step"]
        weights = load_weights(run_dir) if world.is_main and options else {}
        world.barrier()
    return {
        "losses": [e["loss"] for e in steps],
        "lrs": [e["lr"] for e in steps],
        "grad_norms": [e.get("grad_norm") for e in steps],
        "seen": task.seen,
        "metrics": result.metrics,
        "sha256": result.weights_sha256,
        "weights": {name: tensor.tolist() for name, tensor in weights.items()},
    }


def train_cases(world: World, cases: list[Case], **options: Any) -> dict[Case, dict[str, Any]]:
    """Train several, one after the other: one launch for all of them."""
    return {case: train_case(world, case, **options) for case in cases}


def assert_same_answer(case: Case, actual: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare two trainings of a case that may differ in the order of additions only.

    These are of at most a thousand numbers for each gradient here, in every step; an update divides by gradients that
    may be small, so its error is larger than that of the loss.
    """
    rounding = 2.0**-52 if case.dtype == "float64" else 2.0**-23
    near = {"rel": 1000 * rounding, "abs": 1000 * rounding}
    far = {"rel": 1e-9, "abs": 1e-9} if case.dtype == "float64" else {"rel": 20000 * rounding, "abs": 20000 * rounding}
    assert actual["losses"] == pytest.approx(wanted["losses"], **near)
    assert actual["grad_norms"] == pytest.approx(wanted["grad_norms"], **far)
    assert actual["lrs"] == wanted["lrs"]
    assert actual["metrics"] == pytest.approx(wanted["metrics"], **far)
    assert actual["weights"].keys() == wanted["weights"].keys()
    for name, tensor in wanted["weights"].items():
        assert _flat(actual["weights"][name]) == pytest.approx(_flat(tensor), **far), name


def _flat(nested: Any) -> list[float]:
    if not isinstance(nested, list):
        return [math.nan if nested is None else nested]
    return [number for item in nested for number in _flat(item)]


__all__ = ["CASES", "STEPS", "Case", "assert_same_answer", "instep", "train_case", "train_cases"]
