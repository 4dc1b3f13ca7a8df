"""Trainings for tensor parallelism: models of the common shapes, and what is recorded of a training of one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import instep
from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.train.loop import Loop
from instep.train.worker import open_run
from instep.world.world import World

STEPS = 8
WORDS, LENGTH, WIDTH = 29, 6, 24


class Attention(nn.Module):
    """Separate projections, the heads cut with -1; dropout on the weights of attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.q_norm = nn.LayerNorm(width // num_heads)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            part.view(rows, length, self.num_heads, -1).transpose(1, 2)
            for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        scores = self.q_norm(q) @ k.transpose(-2, -1)
        mask = torch.ones(length, length).tril() == 0
        weights = self.drop(scores.masked_fill(mask, float("-inf")).softmax(-1))
        return self.o_proj((weights @ v).transpose(1, 2).reshape(rows, length, -1))


class Fused(nn.Module):
    """One projection for queries, keys and values, as in nanoGPT; the shape is written out."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(result.transpose(1, 2).reshape(rows, length, width))


class Gated(nn.Module):
    """An MLP with a gate; dropout on what the ranks share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.drop, self.down = nn.Dropout(0.2), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, fused: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Fused(width, num_heads) if fused else Attention(width, num_heads)
        self.mlp = Gated(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """A language model; the embedding is also the head, where it is tied."""

    def __init__(self, num_heads: int = 4, fused: bool = False, tied: bool = True, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, num_heads, fused) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        return self.head(self.norm(h))


class Encoder(nn.Module):
    """torch's own layers, with their default dropout inside the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH, vdim=WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=self.embed.weight.dtype)
        h = self.body(self.embed(x), mask=causal, is_causal=True).transpose(0, 1)
        result, weights = self.cross(h, h.flip(0), h.flip(0))
        return self.head((h + result).transpose(0, 1)) * (1 + weights.sum() / 1000)


class Perceptron(nn.Module):
    """An MLP with BatchNorm, dropout, a width that does not divide, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 21), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(21, 12), nn.BatchNorm1d(12)
        )
        self.unused = nn.Linear(40, 3)
        self.head = nn.Linear(12, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(x).flatten(0, 1)).tanh()).unflatten(0, x.shape)


def without_head_norm(model: Transformer) -> nn.Module:
    for block in model.blocks:
        block.attention.q_norm = nn.Identity()
    return model


class Brought(nn.Module):
    """Brings its plan along, as Hugging Face's models do."""

    base_model_prefix = "model"
    _tp_plan: ClassVar = {"lm_head": "colwise_rep", "vision.*": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(tied=False)
        self.model.head = nn.Identity()
        self.lm_head = nn.Linear(WIDTH, WORDS)
        plan = {
            "blocks.*.attention.q_proj": "colwise",
            "blocks.*.attention.k_proj": "colwise",
            "blocks.*.attention.v_proj": "colwise",
            "blocks.*.attention.o_proj": "rowwise",
            "blocks.*.mlp.gate": "colwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "blocks.*.norm_1": "sequence_parallel",
            "norm": "something_new",
        }
        self.config = SimpleNamespace(base_model_tp_plan=plan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(x))


MODELS = {
    "transformer": Transformer,
    "fused": lambda: Transformer(fused=True, tied=False),
    "encoder": Encoder,
    "mlp": Perceptron,
    "six_heads": lambda: Transformer(num_heads=6),
    "recomputed": lambda: Transformer(recompute=True),
    "brought": Brought,
    "bare": lambda: without_head_norm(Transformer()),
}


@dataclass(kw_only=True)
class Words(instep.Task):
    """Learns which word follows; some words count for nothing."""

    model_name: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    weighted: bool = False
    optimizer_name: str = "sgd"
    dtype: torch.dtype = torch.float64

    def model(self) -> nn.Module:
        return MODELS[self.model_name]().to(self.dtype)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(params, lr=3e-3, fused=True)
        if self.optimizer_name == "adam":
            return torch.optim.Adam(params, lr=3e-3, foreach=True)
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def train_data(self) -> Any:
        words = torch.randint(0, WORDS, (43, LENGTH), generator=torch.Generator().manual_seed(2))
        return words, words.roll(-1, 1)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        if not self.weighted:
            return each.mean()
        counts = (y.flatten() % 3 > 0).to(each)
        return (each * counts).sum() / counts.sum(), counts.sum()

    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return {"accuracy": (model(x).argmax(-1) == y).double().mean(1)}


class Planned(Words):
    def tensor_plan(self, model: nn.Module) -> Mapping[str, Any]:
        return self.plan


@dataclass(frozen=True)
class Case:
    model: str
    optimizer: str = "sgd"
    batch_size: int = 10
    accumulate: int = 1
    weighted: bool = False
    clip_norm: float | None = None
    plan: tuple[tuple[str, Any], ...] = ()
    on_nan: str = "stop"
    blind: bool = False
    """Without an example, as in a loop of one's own."""

    def task(self) -> Words:
        kind = Planned if self.plan else Words
        return kind(model_name=self.model, weighted=self.weighted, optimizer_name=self.optimizer, plan=dict(self.plan))

    def __str__(self) -> str:
        extra = ["weighted"] * self.weighted + [f"accumulate{self.accumulate}"] * (self.accumulate > 1)
        extra += ["clip"] * (self.clip_norm is not None) + ["blind"] * self.blind
        return "-".join([self.model, self.optimizer, *extra])


def train_case(world: World, case: Case, mesh: str | None = None) -> dict[str, Any]:
    """Train one as a rank, and give all that is compared. Nothing is saved."""
    task = case.task()
    spec = TrainSpec(
        steps=STEPS, batch_size=case.batch_size, accumulate=case.accumulate, clip_norm=case.clip_norm, mesh=mesh,
        save_every="never", check_every=0, seed=4, threads=1, on_nan=case.on_nan,
    )  # fmt: skip
    data = task.train_data()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(world.broadcast_object(scratch))
        with open_run(world, spec, RunDirectory(run_dir), "Words") as run:
            if case.blind:
                run.prepare(task.model(), task.optimizer)
            else:
                Loop(run, task)
            model, optimizer = run.engine.trained[0].model, run.engine.trained[0].optimizer
            for step in run.steps(data):
                step.compute(model, task.loss)
                step.finish()
            metrics = run.evaluate(task.metrics, data)
            held = bytes_held(model, optimizer)
            weights = {name: whole(value) for name, value in model.state_dict().items()}
        world.barrier()
        events = list(read_events(run_dir))
        world.barrier()
    steps = [e for e in events if e["event"] == "step"]
    return {
        "losses": [e["loss"] for e in steps],
        "grad_norms": [e["grad_norm"] for e in steps if e.get("grad_norm") is not None],
        "weights": weights,
        "metrics": metrics,
        "notices": [e["text"] for e in events if e["event"] == "notice"],
        "bytes": held,
    }


def train_cases(world: World, cases: list[Case], mesh: str | None = None) -> list[dict[str, Any]]:
    return [train_case(world, case, mesh) for case in cases]


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def bytes_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank, by parameter."""
    held = {}
    for name, p in model.named_parameters():
        state = [value for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
        tensors = [each for each in (p, p.grad, *state) if each is not None]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        held[name] = sum(each.untyped_storage().nbytes() if each is local[0] else each.nbytes for each in local)
    return held
