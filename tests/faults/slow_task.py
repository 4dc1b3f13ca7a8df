"""A Task that takes its time, so that it can be killed in the middle; faults by step are its fields."""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import instep


@dataclass(kw_only=True)
class Slow(instep.Task):
    pause_s: float = 0.02
    raise_at: int = 0
    raise_on_rank: int = 1

    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.01)

    def scheduler(self, optimizer, num_steps):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    def train_data(self):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(103, 6, generator=generator).double()
        return x, torch.randint(0, 3, (103,), generator=generator), torch.arange(103)

    def loss(self, model, batch):
        x, y, index = batch
        if torch.is_grad_enabled():  # and not the few rows that are tried before the first step
            time.sleep(self.pause_s)
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == self.raise_at and torch.distributed.get_rank() == self.raise_on_rank:
                raise KeyError("sample 17")
            print("samples", *index.tolist(), flush=True)
        return F.cross_entropy(model(x), y)


if __name__ == "__main__":
    instep.main(Slow)
