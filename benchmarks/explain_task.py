"""A Task with a bottleneck that is planted: explain_campaign.py trains it in many ways, and asks `instep explain`."""

import os
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep


def work(seconds):
    """Compute for about so long, on one core."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Images(torch.utils.data.Dataset):
    def __init__(self, task, count):
        self._task, self._count = task, count

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        task = self._task
        if task.is_planted("sample_sleep"):
            time.sleep(task.seconds)
        if task.is_planted("sample_work"):
            work(task.seconds)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, task.pixels, task.pixels, generator=generator), index % 10


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + F.relu(self.conv(x))


class Slow(torch.autograd.Function):
    """Nothing, slowly, in the backward pass."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


@dataclass(kw_only=True)
class Planted(instep.Task):
    """Images into classes. `plant` is what is slow, by `seconds`, on `rank` (-1: on all)."""

    plant: str = ""
    seconds: float = 0.0
    rank: int = -1
    net: str = "conv"
    sgd: bool = False
    width: int = 16
    depth: int = 2
    pixels: int = 16
    samples: int = 4096
    eval_samples: int = 64

    def is_planted(self, what):
        return self.plant == what and self.rank in (-1, int(os.environ.get("RANK", "0")))

    def model(self):
        if self.plant == "slow_model":
            time.sleep(self.seconds)
        inputs, width = 3 * self.pixels**2, self.width
        if self.net == "mlp":
            hidden = [layer for _ in range(self.depth) for layer in (nn.Linear(width, width), nn.ReLU())]
            return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), *hidden, nn.Linear(width, 10))
        if self.net == "transformer":
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            return nn.Sequential(
                nn.Flatten(2), nn.Linear(self.pixels**2, width), nn.TransformerEncoder(layer, self.depth), Head(width)
            )
        blocks = [Block(width) for _ in range(self.depth)]
        ends = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10)
        return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *ends)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1e-4) if self.sgd else torch.optim.Adam(params, lr=1e-4)

    def train_data(self):
        if self.plant == "slow_data":
            time.sleep(self.seconds)
        return Images(self, self.samples)

    def eval_data(self):
        return Images(self, self.eval_samples)

    def collate(self, samples):
        if self.is_planted("collate_sleep"):
            time.sleep(self.seconds)
        if self.plant == "shapes":  # each batch has another one
            side = 4 + samples[0][1] % 10
            samples = [(x[:, :side, :side], y) for x, y in samples]
        return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])

    def loss(self, model, batch):
        x, y = batch
        if self.is_planted("loss_sleep"):
            time.sleep(self.seconds)
        if self.is_planted("loss_work"):
            work(self.seconds)
        scores = model(x)
        if self.is_planted("loss_sync"):
            for _ in range(200):
                float(scores.sum())  # the host waits for the accelerator each time
        if self.is_planted("backward_sleep"):
            scores = Slow.apply(scores, self.seconds)
        return F.cross_entropy(scores, y)

    def metrics(self, model, batch):
        x, y = batch
        if self.is_planted("metric_sleep"):
            time.sleep(self.seconds)
        return {"accuracy": (model(x).argmax(1) == y).float()}

    def on_step(self, record):
        if self.plant == "hook_sleep":
            time.sleep(self.seconds)
        if self.plant == "hook_work":
            work(self.seconds)

    def stop(self, record):
        if self.plant == "stop_sleep":
            time.sleep(self.seconds)
        return False


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 10)

    def forward(self, x):
        return self.linear(x.mean(1))
