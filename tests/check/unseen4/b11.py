# House price style tabular regression. MLP with feature embeddings, plateau schedule, DDP.
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_table(n, seed):
    rng = np.random.default_rng(seed)
    town = rng.integers(0, 30, n)
    kind = rng.integers(0, 5, n)
    num = rng.normal(size=(n, 8)).astype("float32")
    town_effect = np.random.default_rng(5).normal(0, 1.0, 30)
    y = (town_effect[town] + 0.6 * kind + num[:, 0] * num[:, 1] + np.sin(2 * num[:, 2]) + 0.5 * num[:, 3]
         + rng.standard_t(3, n) * 0.4)
    return TensorDataset(torch.from_numpy(num), torch.from_numpy(town), torch.from_numpy(kind),
                         torch.from_numpy(y.astype("float32")))


class TabNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.town, self.kind = nn.Embedding(30, 8), nn.Embedding(5, 4)
        self.net = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                 nn.Linear(width, 1))

    def forward(self, num, town, kind):
        return self.net(torch.cat([num, self.town(town), self.kind(kind)], 1)).squeeze(1)


class Meter:
    def __init__(self):
        self.sum, self.n = 0.0, 0

    def add(self, value, n):
        self.sum += float(value) * n
        self.n += n

    @property
    def avg(self):
        return self.sum / max(self.n, 1)

    def global_avg(self):
        t = torch.tensor([self.sum, float(self.n)], dtype=torch.float64)
        dist.all_reduce(t)
        return (t[0] / t[1]).item()


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        torch.manual_seed(args.seed)
        self.train_set, self.val_set = make_table(2400, 100), make_table(400, 101)
        self.sampler = DistributedSampler(self.train_set, seed=args.seed)
        self.train_loader = DataLoader(self.train_set, args.batch_size, sampler=self.sampler, drop_last=True)
        self.val_loader = DataLoader(self.val_set, 100, sampler=DistributedSampler(self.val_set, shuffle=False))
        self.model = DDP(TabNet())
        self.loss = nn.HuberLoss()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=1e-4)
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.5, patience=1, threshold=1e-3)
        self.best = float("inf")
        self.step = 0

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            meter = Meter()
            for num, town, kind, y in self.train_loader:
                loss = self.loss(self.model(num, town, kind), y)
                self.opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
                self.opt.step()
                meter.add(loss.item(), len(y))
                self.step += 1
                if self.step % self.args.eval_every == 0:
                    self.on_eval(epoch)
            train_loss = meter.global_avg()
            if self.rank == 0:
                print(f"epoch {epoch} train {train_loss:.4f}", flush=True)

    def on_eval(self, epoch):
        val = self.validate()
        self.sched.step(val.avg)
        val_loss = val.global_avg()
        if self.rank == 0:
            lr = self.opt.param_groups[0]["lr"]
            print(f"epoch {epoch} step {self.step} val {val_loss:.4f} lr {lr:.2e}", flush=True)
        if val_loss < self.best:
            self.best = val_loss
            self.save()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        meter = Meter()
        for num, town, kind, y in self.val_loader:
            meter.add(self.loss(self.model(num, town, kind), y), len(y))
        self.model.train()
        return meter

    def save(self):
        if self.rank == 0:
            os.makedirs(self.args.out, exist_ok=True)
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(),
                        "sched": self.sched.state_dict(), "step": self.step, "best": self.best},
                       os.path.join(self.args.out, "tabular.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--eval-every", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--out", default="out")
    dist.init_process_group("gloo")
    Trainer(parser.parse_args()).fit()
    dist.barrier()
    dist.destroy_process_group()
