"""Hand-rolled data parallelism: one flat gradient buffer, one all-reduce per step, no DDP wrapper."""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class FlatModel:
    """Owns a contiguous buffer that all .grad tensors point into."""

    def __init__(self, net):
        self.net = net
        self.params = [p for p in net.parameters() if p.requires_grad]
        self.flat = torch.zeros(sum(p.numel() for p in self.params))
        off = 0
        for p in self.params:
            p.grad = self.flat[off:off + p.numel()].view_as(p)
            off += p.numel()
        self.world = dist.get_world_size()
        with torch.no_grad():
            for t in self.net.state_dict().values():
                dist.broadcast(t, 0)

    def zero(self):
        self.flat.zero_()

    def reduce(self):
        dist.all_reduce(self.flat)
        self.flat.div_(self.world)

    def clip(self, limit):
        norm = self.flat.norm()
        if norm > limit:
            self.flat.mul_(limit / norm)
        return norm.item()

    def checksum(self):
        """Largest parameter difference to rank 0; zero when the replicas agree."""
        vec = torch.cat([p.detach().flatten() for p in self.params])
        ref = vec.clone()
        dist.broadcast(ref, 0)
        gap = (vec - ref).abs().max()
        dist.all_reduce(gap, op=dist.ReduceOp.MAX)
        return gap.item()


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), wd=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, wd=wd))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            b1, b2 = g["betas"]
            for p in g["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = (m * b1 + p.grad * (1 - b1)).sign_()
                p.mul_(1 - g["lr"] * g["wd"]).add_(update, alpha=-g["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def shards(n, rank, world, epoch, bs):
    """Same permutation everywhere, cut into global batches, each rank takes its slice of every batch."""
    perm = torch.randperm(n, generator=torch.Generator().manual_seed(1000 + epoch))
    for lo in range(0, n - bs * world + 1, bs * world):
        yield perm[lo + rank * bs: lo + (rank + 1) * bs]


def problem(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=g) * 4 - 2
    y = ((x[:, 0] ** 2 + x[:, 1] ** 2).sqrt() * 3).long().clamp(max=4)
    return x, y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--bs", type=int, default=25)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "rings.pt"))
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)

    x, y = problem(900, 1)
    xv, yv = problem(250, 2)
    fm = FlatModel(nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 5)))
    opt = Lion(fm.params, lr=args.lr, wd=1e-2)
    for epoch in range(args.epochs):
        fm.net.train()
        loss_sum, steps = torch.zeros(()), 0
        for idx in shards(len(x), rank, world, epoch, args.bs):
            xb = x[idx] + 0.02 * torch.randn(len(idx), 2)
            fm.zero()
            loss = F.cross_entropy(fm.net(xb), y[idx])
            loss.backward()
            fm.reduce()
            fm.clip(args.clip)
            opt.step()
            loss_sum += loss.detach()
            steps += 1
        loss_sum /= steps * world
        dist.all_reduce(loss_sum)
        gap = fm.checksum()
        if gap != 0.0:
            raise RuntimeError(f"replicas differ by {gap}")
        if rank == 0:
            with torch.no_grad():
                acc = (fm.net(xv).argmax(1) == yv).float().mean().item()
            print(f"epoch {epoch} loss {loss_sum.item():.4f} acc {acc:.3f}", flush=True)
    if rank == 0:
        torch.save(fm.net.state_dict(), args.out)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
