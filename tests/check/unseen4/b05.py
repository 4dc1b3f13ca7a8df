"""Denoising autoencoder on 8x8 digits, sharded with fully_shard (CPU / gloo)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, set_model_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.ff(self.norm(x))


class Denoiser(nn.Module):
    def __init__(self, dim=96, code=16, depth=2):
        super().__init__()
        self.inp = nn.Linear(64, dim)
        self.enc = nn.ModuleList(Block(dim) for _ in range(depth))
        self.squeeze, self.expand = nn.Linear(dim, code), nn.Linear(code, dim)
        self.dec = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 64)

    def forward(self, x):
        h = self.inp(x)
        for b in self.enc:
            h = b(h)
        h = self.expand(self.squeeze(h))
        for b in self.dec:
            h = b(h)
        return self.out(h)


def build_model(mesh, seed):
    torch.manual_seed(seed)
    model = Denoiser()
    for block in [*model.enc, *model.dec]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@torch.no_grad()
def validate(model, x, noise, rank, world, bs=60):
    model.eval()
    x, noise = x[rank::world], noise[rank::world]
    acc = torch.zeros(2, dtype=torch.float64)
    for i in range(0, len(x), bs):
        err = (model(x[i:i + bs] + noise[i:i + bs]) - x[i:i + bs]) ** 2
        acc += torch.tensor([err.sum().item(), err.numel()], dtype=torch.float64)
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--sigma", type=float, default=0.25)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=5)
    ap.add_argument("--ckpt", default="out/denoiser.pt")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    train, val = x[:1437], x[1437:]
    val_noise = args.sigma * torch.randn(val.shape, generator=torch.Generator().manual_seed(1))

    model = build_model(mesh, args.seed)
    torch.manual_seed(args.seed + 1 + rank)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sampler = DistributedSampler(TensorDataset(train), shuffle=True, drop_last=True, seed=args.seed)
    loader = DataLoader(TensorDataset(train), batch_size=args.batch_size, sampler=sampler, drop_last=True)

    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        n_micro, group = len(loader), args.accum
        running = torch.zeros(1)
        for i, (clean,) in enumerate(loader):
            if i % args.accum == 0:
                group = min(args.accum, n_micro - i)
            boundary = (i + 1) % args.accum == 0 or i + 1 == n_micro
            model.set_requires_gradient_sync(boundary)
            noisy = clean + args.sigma * torch.randn_like(clean)
            loss = F.mse_loss(model(noisy), clean) / group
            loss.backward()
            running += loss.detach() * group / n_micro
            if boundary:
                gnorm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
                opt.step()
                opt.zero_grad()
        dist.all_reduce(running)
        val_mse = validate(model, val, val_noise, rank, world)
        if rank == 0:
            print(f"epoch {epoch} train {running.item() / world:.5f} val {val_mse:.5f} gnorm {gnorm.item():.3f}",
                  flush=True)
        if val_mse < best:
            best = val_mse
            sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if rank == 0:
                os.makedirs(os.path.dirname(args.ckpt), exist_ok=True)
                torch.save(sd, args.ckpt)

    dist.barrier()
    sd = torch.load(args.ckpt) if rank == 0 else {}
    set_model_state_dict(model, sd, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    final = validate(model, val, val_noise, rank, world)
    if rank == 0:
        print(f"restored best checkpoint, val mse {final:.5f} (recorded {best:.5f})", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
