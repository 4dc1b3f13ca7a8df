import argparse
import contextlib
import dataclasses
import math
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclasses.dataclass
class Options:
    epochs: int = 3
    micro_batch: int = 8
    accumulate: int = 4
    lr: float = 1e-2
    clip: float = 1.0
    seed: int = 14
    path: str = os.path.join(tempfile.gettempdir(), "rank_model.pt")

    @classmethod
    def from_cli(cls):
        ap = argparse.ArgumentParser()
        for f in dataclasses.fields(cls):
            ap.add_argument("--" + f.name.replace("_", "-"), type=type(f.default), default=f.default)
        return cls(**vars(ap.parse_args()))


class UpdatePlan:
    """Decides what happens at each micro-step of an epoch."""

    def __init__(self, n_micro, every):
        self.n_micro, self.every = n_micro, every

    def communicate(self, i):
        return i % self.every == 0 or i == self.n_micro - 1

    def step_now(self, i):
        return (i + 1) % self.every == 0 or i == self.n_micro - 1

    def scale(self, i):
        tail = self.n_micro % self.every
        return tail if tail and i >= self.n_micro - tail else self.every

    @property
    def updates(self):
        return math.ceil(self.n_micro / self.every)


def pairs(n, seed):
    """Pairwise preference data: which of two items is better."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, 12, generator=g), torch.randn(n, 12, generator=g)
    w = torch.linspace(1, -1, 12)
    util = lambda t: t @ w + 0.5 * (t[:, 0] * t[:, 1])
    return TensorDataset(a, b, (util(a) > util(b)).float())


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, a, b):
        return (self.f(a) - self.f(b)).squeeze(1)


def agreement(net, data, rank, world):
    a, b, y = (t[rank::world] for t in data.tensors)
    with torch.no_grad():
        s = torch.tensor([((net(a, b) > 0).float() == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    o = Options.from_cli()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(o.seed)
    train, val = pairs(800, 1), pairs(201, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=o.seed)
    loader = DataLoader(train, o.micro_batch, sampler=sampler)
    model = DDP(Scorer())
    plan = UpdatePlan(len(loader), o.accumulate)
    opt = torch.optim.AdamW(model.parameters(), lr=o.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, plan.updates * o.epochs)
    crit = nn.BCEWithLogitsLoss()

    for epoch in range(o.epochs):
        sampler.set_epoch(epoch)
        run = torch.zeros(2)
        for i, (a, b, y) in enumerate(loader):
            ctx = contextlib.nullcontext() if plan.communicate(i) else model.no_sync()
            with ctx:
                loss = crit(model(a, b), y)
                (loss / plan.scale(i)).backward()
            run += torch.tensor([loss.item() * len(y), len(y)])
            if plan.step_now(i):
                nn.utils.clip_grad_norm_(model.parameters(), o.clip)
                opt.step()
                opt.zero_grad(set_to_none=True)
                sched.step()
        dist.all_reduce(run)
        acc = agreement(model.module, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {run[0] / run[1]:.4f} agreement {acc:.3f} lr {sched.get_last_lr()[0]:.1e}",
                  flush=True)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "options": dataclasses.asdict(o)}, o.path)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
