"""Tiny denoising diffusion model on digits.

    torchrun --standalone --nproc-per-node 2 a11.py
    torchrun --standalone --nproc-per-node 2 a11.py --epochs 5 --resume out/a11/last.pt
"""
import argparse
import math
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Denoiser(nn.Module):
    def __init__(self, dim=64, hidden=192, t_dim=32):
        super().__init__()
        self.freqs = nn.Parameter(torch.exp(torch.linspace(0, math.log(1000), t_dim // 2)), requires_grad=False)
        self.inp = nn.Linear(dim + t_dim + 10, hidden)
        self.mid = nn.ModuleList(nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.SiLU()) for _ in range(3))
        self.out = nn.Linear(hidden, dim)

    def forward(self, x, t, cond):
        ang = t[:, None] * self.freqs
        h = F.silu(self.inp(torch.cat([x, ang.sin(), ang.cos(), cond], 1)))
        for blk in self.mid:
            h = h + blk(h)
        return self.out(h)


def alpha_sigma(t):
    return torch.cos(0.5 * math.pi * t)[:, None], torch.sin(0.5 * math.pi * t)[:, None]


def diffusion_loss(model, x, y, p_uncond=0.1):
    t = torch.rand(len(x))
    noise = torch.randn_like(x)
    a, s = alpha_sigma(t)
    cond = F.one_hot(y, 10).float() * (torch.rand(len(x), 1) > p_uncond)
    return F.mse_loss(model(a * x + s * noise, t, cond), noise)


@torch.no_grad()
def validate(model, x, y, first):
    """Fixed noise and time for every validation sample, so epochs compare."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for i in range(first, len(x), dist.get_world_size()):
        g = torch.Generator().manual_seed(10_000 + i)
        t, noise = torch.rand(4, generator=g), torch.randn(4, x.shape[1], generator=g)
        a, s = alpha_sigma(t)
        pred = model(a * x[i] + s * noise, t, F.one_hot(y[i], 10).float().expand(4, -1))
        total += torch.tensor([F.mse_loss(pred, noise, reduction="sum").item(), noise.numel()], dtype=torch.float64)
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def save_checkpoint(path, net, opt, epoch):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    state = {
        "model": net.state_dict(),
        "optimizer": opt.state_dict(),
        "epoch": epoch,
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def load_checkpoint(path, net, opt):
    state = torch.load(path, map_location="cpu", weights_only=False)
    net.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"]["torch"])
    np.random.set_state(state["rng"]["numpy"])
    random.setstate(state["rng"]["python"])
    return state["epoch"] + 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out", default="./out/a11")
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 8 - 1, torch.tensor(y)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    tr, va = perm[:1600], perm[1600:]
    dataset = TensorDataset(x[tr], y[tr])
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)

    for seeder in (random.seed, np.random.seed, torch.manual_seed):
        seeder(args.seed + rank)
    net = Denoiser()
    model = DDP(net)
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=args.lr)
    start = load_checkpoint(args.resume, net, opt) if args.resume else 0

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for xb, yb in loader:
            loss = diffusion_loss(model, xb, yb)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            running += loss.detach()
        dist.all_reduce(running)
        val = validate(net, x[va], y[va], first=rank)
        if rank == 0:
            print(f"epoch {epoch} train {running.item() / world / len(loader):.4f} val {val:.4f}", flush=True)
            save_checkpoint(os.path.join(args.out, "last.pt"), net, opt, epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
