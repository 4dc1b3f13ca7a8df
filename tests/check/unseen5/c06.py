"""House-price style tabular regression. MLP + plateau schedule, checks every few steps."""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-2)
    p.add_argument("--check-every", type=int, default=5)
    p.add_argument("--out", default="./out/c06")
    return p.parse_args()


def houses(n=1800, d=12, seed=3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype("float32")
    w = rng.normal(size=d)
    y = x @ w + 0.8 * np.sin(2 * x[:, 0]) * x[:, 1] + 0.5 * np.maximum(x[:, 2], 0) ** 2
    y = y + 0.7 * rng.standard_t(4, size=n)
    y = (y - y[:1400].mean()) / y[:1400].std()
    x, y = torch.from_numpy(x), torch.from_numpy(y.astype("float32"))
    return TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


def build_model(d):
    return nn.Sequential(
        nn.Linear(d, 64), nn.LayerNorm(64), nn.SiLU(),
        nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU(),
        nn.Linear(64, 1), nn.Flatten(0),
    )


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(42)
        train, valid = houses()
        self.sampler = DistributedSampler(train, shuffle=True)
        self.train_loader = DataLoader(train, args.batch_size, sampler=self.sampler)
        self.valid_loader = DataLoader(valid, 100, sampler=DistributedSampler(valid, shuffle=False))
        self.model = DDP(build_model(12))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.5, patience=1, threshold=1e-3)
        self.loss_fn = nn.MSELoss()
        self.step = 0
        self.best = float("inf")

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total, count = 0.0, 0
        for x, y in self.valid_loader:
            total += self.loss_fn(self.model(x), y).item() * len(y)
            count += len(y)
        self.model.train()
        return total / count

    def reduce_mean(self, value):
        t = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(t)
        return t.item() / self.world

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            epoch_loss = 0.0
            for x, y in self.train_loader:
                loss = self.loss_fn(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                epoch_loss += loss.item()
                self.step += 1
                if self.step % self.args.check_every == 0:
                    val_loss = self.validate()
                    self.sched.step(val_loss)
                    self.report(self.reduce_mean(val_loss))
            mean_loss = self.reduce_mean(epoch_loss / len(self.train_loader))
            if self.rank == 0:
                print(f"== epoch {epoch}: train mse {mean_loss:.4f} best val {self.best:.4f}", flush=True)

    def report(self, val_loss):
        if val_loss < self.best:
            self.best = val_loss
            if self.rank == 0:
                os.makedirs(self.args.out, exist_ok=True)
                torch.save(self.model.module.state_dict(), os.path.join(self.args.out, "best.pt"))
        if self.rank == 0:
            print(f"step {self.step:4d} val mse {val_loss:.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(parse()).fit()
    dist.barrier()
    dist.destroy_process_group()
