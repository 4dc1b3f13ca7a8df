"""The fast path on a GPU: bf16, fused, compiled by default; fp16 with its scale; recomputed blocks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from instep.checkpoint.files import Checkpoint
from instep.checkpoint.rundir import RunDirectory
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.train.task import Task
from instep.train.worker import process_settings, worker_main
from instep.world.world import World
from ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]

DEVICE = "cuda:0"
STEPS = 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        values = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(values.transpose(1, 2).reshape(rows, length, width)))
        return x + self.drop(self.mlp(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 64)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.blocks = nn.Sequential(*(Block(64) for _ in range(3)))
        self.head = nn.Linear(64, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)))


@dataclass(kw_only=True)
class Language(Task):
    """A sequence in which the next token follows from the last; `boosted`: a sample whose gradient overflows fp16."""

    boosted: int | None = None
    fused: bool | None = None

    def model(self) -> nn.Module:
        return Transformer()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        self.made = torch.optim.AdamW(params, lr=3e-3, fused=self.fused)
        return self.made

    def train_data(self) -> Any:
        start = torch.arange(100)
        tokens = torch.stack([(start * 7 + 3 * n) % 61 for n in range(33)], dim=1)
        return {"x": tokens, "index": start}

    def eval_data(self) -> Any:
        return {name: values[:21] for name, values in self.train_data().items()}

    def loss(self, model: Any, batch: Any) -> Any:
        x = batch["x"]
        each = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        each = each.view(len(x), -1).mean(1)
        if self.boosted is not None:
            each = torch.where(batch["index"] == self.boosted, each * 1e6, each)
        return each.mean() / 8  # so that nothing overflows fp16 but what shall


def train(world: World, run_dir: str, task: Language, options: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    given = {"steps": steps, "batch_size": 16, "save_every": "never", "eval_every": "never", "threads": 1, "seed": 3}
    spec = TrainSpec(**given | options)
    with process_settings(spec, world.world_size):
        result = worker_main(world, task, spec, RunDirectory(Path(run_dir)))
    world.barrier()
    events, directory = read_events(Path(run_dir)), RunDirectory(Path(run_dir))
    checkpoint = Checkpoint(directory.checkpoints / directory.names()[0])
    world.barrier()
    steps_made = [e for e in events if e["event"] == "step"]
    return {
        "losses": [e["loss"] for e in steps_made],
        "skipped": [e["step"] for e in steps_made if e.get("skipped")],
        "notices": [e["text"] for e in events if e["event"] == "notice"],
        "scale": dict(checkpoint.part("progress")).get("loss_scale"),
        "precision": dict(checkpoint.part("spec"))["precision"],
        "fused": [group["fused"] for group in task.made.param_groups],
        "eval_loss": result.metrics["eval_loss"],
        "sha256": result.weights_sha256,
        "peak": torch.cuda.max_memory_allocated(),
    }


def on_gpu(run_dir: Path, world_size: int = 1, steps: int = STEPS, task: Language | None = None, **options: Any) -> Any:
    return run_ranks(train, world_size, str(run_dir), task or Language(), options, steps, timeout_s=300, device=DEVICE)[
        0
    ]


@functools.cache
def eager_fp32(folder: Path) -> dict[str, Any]:
    return on_gpu(folder / "fp32", precision="fp32", compile=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def close(actual: dict[str, Any], expected: dict[str, Any], rel: float) -> None:
    print([f"{a:.5f} {b:.5f}" for a, b in zip(actual["losses"], expected["losses"], strict=True)])
    assert actual["losses"] == pytest.approx(expected["losses"], rel=rel)
    assert actual["eval_loss"] == pytest.approx(expected["eval_loss"], rel=rel)
    assert actual["losses"][-1] < 0.9 * actual["losses"][0]


def test_the_defaults_are_the_fast_path(folder: Path) -> None:
    actual = on_gpu(folder / "default")
    assert actual["notices"][0] == "bf16, fused AdamW, compiled"
    assert not [text for text in actual["notices"] if "failed" in text], actual["notices"]
    assert actual["precision"] == "bf16"
    assert actual["fused"] == [True]
    close(actual, eager_fp32(folder), rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_compiled_equals_eager_with_the_same_masks(precision: str, folder: Path) -> None:
    """Other masks would move the loss by several percent."""
    eager = on_gpu(folder / f"eager-{precision}", precision=precision, compile=False)
    compiled = on_gpu(folder / f"compiled-{precision}", precision=precision, compile=True)
    close(compiled, eager, rel={"fp32": 1e-4, "tf32": 2e-3}.get(precision, 0.01))
    close(eager, eager_fp32(folder), rel={"fp32": 1e-4, "tf32": 2e-3}.get(precision, 0.02))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_two_processes_on_one_gpu_equal_one(precision: str, compiled: bool, folder: Path) -> None:
    one = on_gpu(folder / f"one-{precision}-{compiled}", precision=precision, compile=compiled)
    two = on_gpu(folder / f"two-{precision}-{compiled}", 2, precision=precision, compile=compiled)
    close(two, one, rel=0.005)
    assert two["skipped"] == one["skipped"]
    assert two["scale"] == one["scale"]


def test_an_overflow_is_skipped_alike_and_goes_on(folder: Path) -> None:
    task, options = Language(boosted=17), {"precision": "fp16", "compile": False}
    one = on_gpu(folder / "overflow-1", task=task, **options)
    two = on_gpu(folder / "overflow-2", 2, task=task, **options)
    assert len(one["skipped"]) >= 1
    assert one["scale"]["num_skipped"] == len(one["skipped"])
    assert two["skipped"] == one["skipped"]
    assert two["scale"] == one["scale"]
    first = on_gpu(folder / "overflow-parts", task=task, steps=7, **options)
    then = on_gpu(folder / "overflow-parts", 2, task=task, **options)
    assert first["scale"]["num_skipped"] <= then["scale"]["num_skipped"]
    assert then["scale"] == one["scale"]


def test_a_compiled_run_goes_on_from_its_checkpoint(folder: Path) -> None:
    whole = on_gpu(folder / "whole", steps=14)
    on_gpu(folder / "parts", steps=7)
    then = on_gpu(folder / "parts", steps=14)
    assert then["losses"][:7] == pytest.approx(whole["losses"][:7], rel=0.005)
    assert then["losses"][7:] == pytest.approx(whole["losses"][7:], rel=0.005)


@pytest.mark.parametrize("order", [(False, None), (None, False)])
def test_fused_and_unfused_take_each_other_on(order: tuple[Any, Any], folder: Path) -> None:
    options = {"precision": "fp32", "compile": False}
    whole = on_gpu(folder / "form-whole", steps=14, **options)
    where = folder / f"form-{order[0]}"
    on_gpu(where, steps=7, task=Language(fused=order[0]), **options)
    then = on_gpu(where, steps=14, task=Language(fused=order[1]), **options)
    assert then["losses"] == pytest.approx(whole["losses"], rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputed_blocks_give_the_same_and_take_less(precision: str, folder: Path) -> None:
    options = {"precision": precision, "compile": False, "batch_size": 100, "exact": True, "shards": 1}
    once = on_gpu(folder / f"once-{precision}", **options)
    twice = on_gpu(folder / f"twice-{precision}", recompute=True, **options)
    print(once["peak"], twice["peak"])
    assert twice["losses"] == once["losses"]
    assert twice["sha256"] == once["sha256"]
    assert twice["peak"] < 0.9 * once["peak"]


def test_ragged_batches_and_evaluations_are_not_compiled(folder: Path) -> None:
    """100 samples in batches of 16: each epoch ends with 4."""
    actual = on_gpu(folder / "ragged", steps=21, eval_every="1epoch")
    assert not [text for text in actual["notices"] if "failed" in text], actual["notices"]
    assert actual["losses"][-1] < actual["losses"][0]
