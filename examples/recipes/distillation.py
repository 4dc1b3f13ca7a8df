"""Distillation: a small model learns from the answers of a large one.

    instep train examples/digits.py --run-dir runs/teacher --epochs 5
    instep train examples/recipes/distillation.py teacher=runs/teacher -n 2

Without a teacher's run, a large model with random weights stands in. The teacher is no part of the model: it is neither
trained nor saved.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep
from instep.checkpoint.weights import load_weights


def mlp(hidden):
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 10))


@functools.cache
def load_teacher(path, device):
    teacher = mlp(256)
    if path:
        teacher.load_state_dict(load_weights(path))
    return teacher.eval().requires_grad_(False).to(device)


@dataclass(kw_only=True)
class Distillation(instep.Task):
    """A small model learns from a large one."""

    teacher: str = ""
    temperature: float = 2.0

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            load_teacher(self.teacher, "cpu")  # random or not, the same in every process
        return mlp(16)

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=3e-3)

    def train_data(self):
        return instep.data.digits("train")

    def eval_data(self):
        return instep.data.digits("test")

    def loss(self, model, batch):
        x, y = batch
        logits = model(x)
        with torch.no_grad():
            goal = (load_teacher(self.teacher, "cpu").to(x.device)(x) / self.temperature).softmax(1)
        soft = F.kl_div((logits / self.temperature).log_softmax(1), goal, reduction="batchmean")
        return F.cross_entropy(logits, y) + self.temperature**2 * soft

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": model(x).argmax(1) == y}


if __name__ == "__main__":
    instep.main(Distillation)
