"""FSDP2 training of an MLP-mixer style sequence model with sharded gradient clipping."""
import argparse
import logging
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("mixer")


class Mixer(nn.Module):
    def __init__(self, tokens=8, dim=32):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(nn.Linear(tokens, 16), nn.GELU(), nn.Linear(16, tokens))
        self.ch = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


class Model(nn.Module):
    def __init__(self, depth=2, dim=32, classes=4):
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.layers = nn.ModuleList(Mixer(dim=dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Motions(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 4, (n,), generator=g)
        t = torch.arange(8).float().view(1, 8, 1)
        freq = (self.y.float() + 1).view(-1, 1, 1) * 0.4
        phase = 6.28 * torch.rand(n, 1, 6, generator=g)
        self.x = torch.sin(freq * t + phase) + 0.3 * torch.randn(n, 8, 6, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class GradClipper:
    """Works on the local shards directly; avoids materialising full gradients."""

    def __init__(self, params, max_norm, eps=1e-6):
        self.params = list(params)
        self.max_norm, self.eps = max_norm, eps
        self.clipped = 0

    @staticmethod
    def _local(t):
        return t.to_local() if isinstance(t, DTensor) else t

    @torch.no_grad()
    def __call__(self):
        grads = [self._local(p.grad) for p in self.params if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        coef = torch.clamp(self.max_norm / (norm + self.eps), max=1.0)
        if coef < 1:
            self.clipped += 1
        for g in grads:
            g.mul_(coef)
        return norm.item()


def reduce_mean(values):
    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t)
    return (t / dist.get_world_size()).tolist()


def evaluate(model, loader):
    model.eval()
    s = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            s += torch.stack([(model(x).argmax(1) == y).sum().float(), torch.tensor(float(len(y)))])
    dist.all_reduce(s)
    model.train()
    return (s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.2)
    ap.add_argument("--clip", type=float, default=0.2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")

    torch.manual_seed(8)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    clip = GradClipper(model.parameters(), args.clip)

    train, val = Motions(512, 1), Motions(128, 2)
    ts = DistributedSampler(train, world, rank, shuffle=True)
    tl = DataLoader(train, args.bs, sampler=ts)
    vl = DataLoader(val, 32, sampler=DistributedSampler(val, world, rank, shuffle=False))
    total = args.epochs * len(tl)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.5 * (1 + math.cos(math.pi * s / total)))

    for epoch in range(args.epochs):
        ts.set_epoch(epoch)
        losses = []
        for x, y in tl:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            clip()
            opt.step()
            opt.zero_grad()
            sched.step()
            losses.append(loss.item())
        (mean_loss,) = reduce_mean([sum(losses) / len(losses)])
        log.info("epoch %d loss %.4f acc %.3f clipped %d", epoch, mean_loss, evaluate(model, vl), clip.clipped)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
