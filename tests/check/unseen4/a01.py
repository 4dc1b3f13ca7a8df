"""Small-loss selection on digits with corrupted labels.

After every epoch the hardest part of the training set (by running loss) is
left out of the next one; see "co-teaching" and friends.
    torchrun --standalone --nproc-per-node 2 a01.py
"""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=32, help="per process")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--noise-rate", type=float, default=0.15)
    p.add_argument("--keep", type=float, default=0.85)
    p.add_argument("--jitter", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--out", default="./out/a01")
    return p.parse_args()


def load_data(seed, noise_rate):
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x / 16.0, dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.long)
    rs = np.random.RandomState(seed)
    order = rs.permutation(len(x))
    tr, va = order[:1440], order[1440:]
    y_tr = y[tr].clone()
    flip = torch.from_numpy(rs.rand(len(tr)) < noise_rate)
    y_tr[flip] = torch.from_numpy(rs.randint(0, 10, int(flip.sum())))
    return x[tr], y_tr, x[va], y[va]


class LossBook:
    """Exponential moving per-sample loss, one entry per training sample."""

    def __init__(self, n, momentum=0.5):
        self.value = torch.zeros(n)
        self.known = torch.zeros(n, dtype=torch.bool)
        self.momentum = momentum
        self.reset()

    def reset(self):
        self._sum = torch.zeros_like(self.value)
        self._cnt = torch.zeros_like(self.value)

    def add(self, idx, losses):
        self._sum.index_add_(0, idx, losses)
        self._cnt.index_add_(0, idx, torch.ones_like(losses))

    def commit(self):
        dist.all_reduce(self._sum)
        dist.all_reduce(self._cnt)
        seen = self._cnt > 0
        fresh = self._sum / self._cnt.clamp(min=1)
        m = torch.where(self.known, self.momentum, 0.0)
        self.value = torch.where(seen, m * self.value + (1 - m) * fresh, self.value)
        self.known |= seen
        self.reset()


def epoch_indices(book, epoch, args, rank, world):
    n = len(book.value)
    if epoch == 0:
        pool = np.arange(n)
    else:
        pool = torch.argsort(book.value, stable=True)[: int(args.keep * n)].numpy()
    order = np.random.RandomState(args.seed * 1000 + epoch).permutation(pool)
    usable = len(order) // (args.batch_size * world) * args.batch_size * world
    return torch.from_numpy(order[:usable][rank::world].copy())


@torch.no_grad()
def accuracy(net, x, y, rank, world):
    net.eval()
    pred = net(x[rank::world]).argmax(1)
    stat = torch.tensor([(pred == y[rank::world]).sum().item(), len(pred)], dtype=torch.float64)
    dist.all_reduce(stat)
    net.train()
    return (stat[0] / stat[1]).item()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, xv, yv = load_data(args.seed, args.noise_rate)

    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)
    book = LossBook(len(x))
    torch.manual_seed(args.seed + 100 * (rank + 1))  # jitter and dropout

    best = 0.0
    for epoch in range(args.epochs):
        for idx in epoch_indices(book, epoch, args, rank, world).split(args.batch_size):
            xb = x[idx] + args.jitter * torch.randn(len(idx), x.shape[1])
            losses = F.cross_entropy(model(xb), y[idx], reduction="none")
            opt.zero_grad()
            losses.mean().backward()
            opt.step()
            book.add(idx, losses.detach())
        sched.step()
        book.commit()
        acc = accuracy(model.module, xv, yv, rank, world)
        if rank == 0:
            print(f"epoch {epoch} acc {acc:.4f} mean sample loss {book.value.mean():.4f}", flush=True)
            if acc > best:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": net.state_dict(), "acc": acc}, os.path.join(args.out, "best.pt"))
        best = max(best, acc)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
