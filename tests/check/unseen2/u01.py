"""Tabular regressor with gradient accumulation, bf16 autocast and a warmup schedule."""
import argparse
import contextlib
import logging
import math
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("tabular")


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=2e-2)
    p.add_argument("--warmup", type=int, default=4)
    p.add_argument("--max-norm", type=float, default=1.0)
    p.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "tabular_run"))
    return p.parse_args()


def make_data(n=464, d=20):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, d, generator=g)
    w = torch.randn(d, 1, generator=g)
    y = x @ w + 0.3 * torch.sin(3 * x[:, :1]) + 0.05 * torch.randn(n, 1, generator=g)
    return TensorDataset(x, y)


class Regressor(nn.Module):
    def __init__(self, d=20, h=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.LayerNorm(h), nn.Linear(h, h), nn.GELU())
        self.out = nn.Linear(h, 1)

    def forward(self, x):
        return self.out(self.body(x))


class Trainer:
    def __init__(self, args, rank, world):
        self.args, self.rank, self.world = args, rank, world
        torch.manual_seed(0)
        self.model = DDP(Regressor())
        self.sampler = DistributedSampler(make_data(), num_replicas=world, rank=rank, shuffle=True, seed=11)
        self.loader = DataLoader(self.sampler.dataset, batch_size=args.batch_size, sampler=self.sampler)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)
        updates = math.ceil(len(self.loader) / args.accum) * args.epochs
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda s: self.factor(s, updates))
        self.updates_done = 0

    def factor(self, step, total):
        if step < self.args.warmup:
            return (step + 1) / self.args.warmup
        t = (step - self.args.warmup) / max(1, total - self.args.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, t)))

    def windows(self):
        """Group micro-batches so that a short last window is still averaged correctly."""
        buf = []
        for batch in self.loader:
            buf.append(batch)
            if len(buf) == self.args.accum:
                yield buf
                buf = []
        if buf:
            yield buf

    def update(self, window):
        n_samples = sum(len(x) for x, _ in window)
        total = torch.zeros(())
        for i, (x, y) in enumerate(window):
            last = i == len(window) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    pred = self.model(x)
                loss = F.mse_loss(pred.float(), y, reduction="sum") / n_samples
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_norm)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.sched.step()
        self.updates_done += 1
        return total * n_samples, n_samples

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            agg = torch.zeros(2)
            for window in self.windows():
                s, n = self.update(window)
                agg += torch.tensor([s.item(), float(n)])
            dist.all_reduce(agg)
            if self.rank == 0:
                log.info("epoch %d mse %.4f lr %.2e updates %d", epoch, agg[0] / agg[1],
                         self.sched.get_last_lr()[0], self.updates_done)
            self.save(epoch)

    def save(self, epoch):
        if self.rank == 0:
            os.makedirs(self.args.out, exist_ok=True)
            tmp = os.path.join(self.args.out, "last.pt.tmp")
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(),
                        "sched": self.sched.state_dict(), "epoch": epoch}, tmp)
            os.replace(tmp, os.path.join(self.args.out, "last.pt"))
        dist.barrier()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        Trainer(args, dist.get_rank(), dist.get_world_size()).fit()
    finally:
        time.sleep(0.5)  # let the gloo threads finish
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
