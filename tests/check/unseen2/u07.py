import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def get_world():
    dist.init_process_group("gloo", init_method="env://")
    return dist.get_rank(), dist.get_world_size()


def load_forecast_windows(n_series=40, length=60, window=12):
    g = torch.Generator().manual_seed(17)
    t = torch.arange(length).float()
    xs, ys = [], []
    for _ in range(n_series):
        f, ph, tr = torch.rand(3, generator=g)
        s = torch.sin(t * (0.2 + f) + 6 * ph) + 0.02 * tr * t + 0.15 * torch.randn(length, generator=g)
        w = s.unfold(0, window + 1, 6)
        xs.append(w[:, :-1])
        ys.append(w[:, -1:])
    return TensorDataset(torch.cat(xs), torch.cat(ys))


class Forecaster(nn.Module):
    def __init__(self, window=12, width=40, p=0.1):
        super().__init__()
        self.inp = nn.Linear(window, width)
        self.mid = nn.Linear(width, width)
        self.drop = nn.Dropout(p)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        h = h + torch.relu(self.mid(self.drop(h)))
        return self.out(h)


class Monitor:
    """Keeps running sums and turns them into averages."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, value, n):
        self.total += float(value) * n
        self.count += n

    @property
    def avg(self):
        return self.total / max(1, self.count)

    def global_avg(self):
        t = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(t)
        return (t[0] / t[1].clamp(min=1)).item()


class Experiment:
    def __init__(self, opts, rank, world):
        self.o, self.rank, self.world = opts, rank, world
        data = load_forecast_windows()
        perm = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
        cut = int(0.8 * len(data))
        self.train_set, self.val_set = Subset(data, perm[:cut]), Subset(data, perm[cut:])
        self.sampler = DistributedSampler(self.train_set, shuffle=True, seed=opts.seed)
        self.train_dl = DataLoader(self.train_set, opts.batch, sampler=self.sampler)
        own = Subset(self.val_set, range(rank, len(self.val_set), world))
        self.val_dl = DataLoader(own, opts.batch)
        torch.manual_seed(opts.seed + rank)
        self.model = DDP(Forecaster())
        self.opt = torch.optim.Adam(self.model.parameters(), lr=opts.lr)
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.opt, factor=0.5, patience=opts.patience, threshold=1e-2)
        self.best = float("inf")

    def fit_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        m = Monitor()
        for x, y in self.train_dl:
            loss = nn.functional.smooth_l1_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            m.add(loss.item(), len(x))
        return m

    @torch.no_grad()
    def validate(self):
        net = self.model.module.eval()
        m = Monitor()
        for x, y in self.val_dl:
            m.add(nn.functional.smooth_l1_loss(net(x), y).item(), len(x))
        return m

    def after_epoch(self, epoch, tr, va):
        val = va.global_avg()
        self.sched.step(va.avg)
        if val < self.best:
            self.best = val
            self.save()
        train = tr.global_avg()
        if self.rank == 0:
            lr = self.opt.param_groups[0]["lr"]
            print(f"{epoch:02d} train {train:.4f} val {val:.4f} best {self.best:.4f} lr {lr:g}", flush=True)

    def save(self):
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), self.o.ckpt)
        dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--patience", type=int, default=0)
    p.add_argument("--seed", type=int, default=9)
    p.add_argument("--ckpt", default=os.path.join(tempfile.gettempdir(), "forecaster_best.pt"))
    opts = p.parse_args()
    exp = Experiment(opts, *get_world())
    for epoch in range(opts.epochs):
        exp.after_epoch(epoch, exp.fit_epoch(epoch), exp.validate())
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
