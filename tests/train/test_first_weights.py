"""Weights of another model: all of them or a refusal; with --init-partial what fits, and a list of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import instep
from instep.checkpoint.weights import load_weights
from instep.core.errors import CheckpointError, SpecError
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from tasks import Small


class Net(nn.Module):
    def __init__(self, num_classes: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(6, 6) for _ in range(num_blocks)))
        self.head = nn.Linear(6, num_classes)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tied(self.blocks(x)))


@dataclass(kw_only=True)
class Tuned(Small):
    num_classes: int = 3
    num_blocks: int = 2
    lr: float = 0.0

    def model(self) -> nn.Module:
        return Net(self.num_classes, self.num_blocks).double()


def train(task: instep.Task, run_dir: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Make one step that changes nothing, and return the weights."""
    instep.train(task, steps=1, batch_size=8, run_dir=str(run_dir), eval_every="never", quiet=True, **options)
    return load_weights(run_dir)


def notices(run_dir: Path) -> list[str]:
    return [e["text"] for e in read_events(run_dir) if e["event"] == "notice" and "init_from" in e["text"]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a model with ten classes, as Hugging Face writes them: a tied one once."""
    torch.manual_seed(3)
    state = Net(10, 2).double().state_dict()
    del state["tied.weight"]
    path = tmp_path_factory.mktemp("weights") / "other.safetensors"
    save_file(state, path)
    return path


def test_a_tied_weight_may_be_there_once(file: Path, tmp_path: Path) -> None:
    weights = train(Tuned(num_classes=10), tmp_path, init_from=str(file))
    assert all(torch.equal(weights[name], tensor) for name, tensor in load_weights(file).items())
    assert torch.equal(weights["tied.weight"], weights["blocks.0.weight"])
    assert notices(tmp_path) == []


def test_a_new_head(file: Path, tmp_path: Path) -> None:
    new = train(Tuned(num_blocks=3), tmp_path / "new")
    with pytest.raises(CheckpointError) as refused:
        train(Tuned(num_blocks=3), tmp_path / "refused", init_from=str(file))
    left_out = (
        "of another shape: head.weight (3×6, and 10×6 there), head.bias (3, and 10 there); "
        "only in the model: blocks.2.weight, blocks.2.bias"
    )
    assert str(refused.value) == (
        f"init_from={file}: these weights do not fit the model. {left_out}. If that is meant (a new head, say), add "
        "--init-partial: it loads the 4 that fit, and the others start anew."
    )
    weights = train(Tuned(num_blocks=3), tmp_path / "part", init_from=str(file), init_partial=True)
    assert notices(tmp_path / "part") == [f"init_from={file}: 4 of the model's 9 tensors loaded. {left_out}."]
    saved = load_weights(file)
    for name, tensor in weights.items():  # what was not loaded is what the seed gives
        expected = saved["blocks.0.weight"] if name == "tied.weight" else saved.get(name, new[name])
        assert torch.equal(tensor, expected if expected.shape == tensor.shape else new[name]), name


def test_a_long_list_is_shortened(file: Path, tmp_path: Path) -> None:
    train(Tuned(num_classes=10, num_blocks=9), tmp_path, init_from=str(file), init_partial=True)
    (text,) = notices(tmp_path)
    assert text.endswith("blocks.4.weight, blocks.4.bias, … (14 in all).")


def test_nothing_fits(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"model.first.weight": torch.zeros(4, 4)}, other)
    for options in ({}, {"init_partial": True}):
        with pytest.raises(CheckpointError, match=r"none of the 1 tensor does\. There: model\.first\.weight"):
            train(Tuned(), tmp_path / "run", init_from=str(other), **options)
    with pytest.raises(SpecError, match="init_partial is for --init-from"):
        TrainSpec(init_partial=True)
