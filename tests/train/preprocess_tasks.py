"""A Task whose data is scaled and whose words are numbered by what it fitted; loaded by its file, as a run's is."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import instep
from instep.events.schema import SaveRecord

WORDS = ("red green blue", "red blue", "green green red", "blue")


def table(count: int, seed: int) -> tuple[torch.Tensor, list[str], torch.Tensor]:
    """Columns far from zero, of very different sizes, and texts."""
    random = numpy.random.default_rng(seed)
    x = random.normal(size=(count, 4)) * [1e-3, 1.0, 1e4, 0.0] + [1e6, 0.0, 1e5, 7.0]
    return torch.from_numpy(x), [WORDS[i % 4] for i in range(count)], torch.from_numpy(random.integers(0, 3, count))


@dataclass(kw_only=True)
class Scaled(instep.Task):
    """Learns nothing from data that is not scaled."""

    notes: str = ""
    """A folder: a file for each call of preprocess, and `die`, which kills rank 0 after a checkpoint."""

    def preprocess(self) -> Any:
        with (Path(self.notes) / "calls").open("a") as calls:
            calls.write("called\n")
        torch.rand(3)  # draws: the model must not depend on it
        x, texts, _ = table(90, 1)
        words = instep.data.Vocabulary().fit(texts)
        return {"scaler": instep.data.StandardScaler().fit(x), "words": words, "classes": ("a", "b", "c")}

    def model(self) -> nn.Module:
        embedding = nn.EmbeddingBag(len(self.fitted["words"]), 4)
        return Net(embedding, nn.Linear(4, len(self.fitted["classes"]))).double()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.5)

    def train_data(self) -> Any:
        return self._data(90, 1)

    def eval_data(self) -> Any:
        return self._data(31, 2)

    def _data(self, count: int, seed: int) -> Any:
        x, texts, y = table(count, seed)
        ids = torch.tensor([(self.fitted["words"].encode(text) * 3)[:3] for text in texts])
        return x, ids, y

    def loss(self, model: Any, batch: Any) -> Any:
        x, ids, y = batch
        return F.cross_entropy(model(self.fitted["scaler"].transform(x), ids), y)

    def on_save(self, record: SaveRecord) -> None:
        if (Path(self.notes) / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    def __init__(self, words: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.words, self.head = words, head

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.words(ids))  # type: ignore[no-any-return]
