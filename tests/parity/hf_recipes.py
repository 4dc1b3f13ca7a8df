"""Trainings of Hugging Face models whose answer must not depend on the world size: the Tasks of examples/, smaller."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn

from commands import ROOT
from instep.checkpoint.rundir import RunDirectory
from instep.core.errors import InstepError
from instep.core.spec import TrainSpec
from instep.events.read import read_events
from instep.train.result import Result
from instep.train.worker import process_settings, worker_main
from instep.world.world import World

sys.path.append(str(ROOT / "examples"))

from bert_classifier import LineClassifier
from llama_lm import LlamaLM

datasets.disable_progress_bars()
SPEC: dict[str, Any] = {"batch_size": 7, "steps": 4, "threads": 1, "save_every": "never", "eval_every": "never"}


class _Few:
    """Few samples, and a model in float64."""

    dtype: str

    def model(self) -> nn.Module:
        model: nn.Module = super().model()  # type: ignore[misc]
        return model.double() if self.dtype == "float64" else model

    def train_data(self) -> Any:
        return super().train_data().select(range(60))  # type: ignore[misc]

    def eval_data(self) -> Any:
        return super().eval_data().select(range(23))  # type: ignore[misc]


@dataclass(kw_only=True)
class Bert(_Few, LineClassifier):
    """With its dropout, in the attention too; padded by the part."""

    width: int = 32
    dtype: str = "float64"


@dataclass(kw_only=True)
class Llama(_Few, LlamaLM):
    """With tied weights, and a loss that is a mean over tokens."""

    width: int = 32
    dtype: str = "float64"


@dataclass(kw_only=True)
class Lora(Llama):
    """An adapter on a frozen Llama."""

    tied: bool = False

    def model(self) -> nn.Module:
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        return get_peft_model(super().model(), config, autocast_adapter_dtype=False)


TASKS = {"bert": Bert, "llama": Llama, "lora": Lora}
Case = tuple[str, dict[str, Any], dict[str, Any]]
"""The name of a Task, its fields, options."""


def train(world: World, name: str, fields: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Train a Task as a rank; return what `outcome` does, or what it was refused with."""
    path = world.broadcast_object(tempfile.mkdtemp() if world.is_main else None)
    given = {**SPEC, **options}
    changes = given.pop("then", [])
    """Of options: the run stops where they say, and continues so."""
    for change in ({}, *changes):
        spec = TrainSpec(**{**given, **change})
        try:
            with process_settings(spec, world.world_size):
                result = worker_main(world, TASKS[name](**fields), spec, RunDirectory(Path(path)))
        except InstepError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    return outcome(result)


def outcome(result: Result) -> dict[str, Any]:
    """Return losses, metrics, hash, notices and the names of the tensors that were saved."""
    events, checkpoint = read_events(Path(result.run_dir)), max((Path(result.run_dir) / "checkpoints").iterdir())
    return {
        "losses": [e["loss"] for e in events if e["event"] == "step"],
        "notices": [e["text"] for e in events if e["event"] == "notice"],
        "metrics": result.metrics,
        "sha256": result.weights_sha256,
        "saved": sorted({name for file in checkpoint.glob("model*.safetensors") for name in _names_in(file)}),
    }


def _names_in(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return [name.partition("@")[0] for name in file.keys()]  # noqa: SIM118 - a piece has its place after the @


def train_all(world: World, cases: list[Case]) -> list[dict[str, Any]]:
    """Train one after the other: one launch, and one import of transformers, for all of them."""
    return [train(world, *case) for case in cases]
