#!/usr/bin/env python
"""Coordinate network: fit a continuous field (a fake elevation map) from scattered samples,
then report the PSNR on a held-out grid."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SEED = 1234


def elevation(xy):
    """A few ridges, bumps and ripples on the unit square, values in about [0, 1]."""
    g = torch.Generator().manual_seed(6)
    waves = torch.randn(14, 2, generator=g) * 9
    phase = torch.rand(14, generator=g) * 2 * math.pi
    centres = torch.rand(6, 2, generator=g)
    ripples = torch.sin(xy @ waves.t() + phase).sum(-1) / 14
    bumps = torch.exp(-((xy[:, None] - centres) ** 2).sum(-1) * 60).sum(-1)
    return (0.5 + 0.8 * ripples + 0.3 * bumps)[:, None]


class RandomFourier:
    def __init__(self, n, scale):
        self.directions = torch.randn(2, n) * scale

    def __call__(self, xy):
        arg = 2 * math.pi * xy @ self.directions
        return torch.cat([arg.sin(), arg.cos()], dim=-1)


class FieldNet(nn.Module):
    def __init__(self, features=48, width=64, scale=2.5):
        super().__init__()
        self.encode = RandomFourier(features, scale)
        self.mlp = nn.Sequential(
            nn.Linear(2 * features, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, xy):
        return self.mlp(self.encode(xy))

    def export(self):
        return {"mlp": self.mlp.state_dict(), "directions": self.encode.directions}


def grid(side):
    axis = (torch.arange(side) + 0.5) / side
    return torch.cartesian_prod(axis, axis)


@torch.no_grad()
def psnr(net, loader):
    acc = torch.zeros(2, dtype=torch.double)
    for xy, z in loader:
        acc += torch.tensor([F.mse_loss(net(xy), z, reduction="sum").item(), z.numel()], dtype=torch.double)
    dist.all_reduce(acc)
    return -10 * math.log10(acc[0] / acc[1])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)

    shared = torch.Generator().manual_seed(SEED)
    points = torch.rand(6144, 2, generator=shared)
    train = TensorDataset(points, elevation(points) + 0.02 * torch.randn(6144, 1, generator=shared))
    lattice = grid(64)
    held = TensorDataset(lattice, elevation(lattice))

    sampler = DistributedSampler(train, shuffle=True, seed=SEED)
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    held_loader = DataLoader(held, batch_size=512, sampler=DistributedSampler(held, shuffle=False))

    model = DDP(FieldNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * len(loader))

    for epoch in range(4):
        sampler.set_epoch(epoch)
        mean_loss = torch.zeros(1)
        for xy, z in loader:
            jitter = 0.002 * torch.randn_like(xy)
            loss = F.mse_loss(model(xy + jitter), z)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            mean_loss += loss.item() / len(loader)
        dist.all_reduce(mean_loss)
        quality = psnr(model.module, held_loader)
        if rank == 0:
            print(f"epoch {epoch} train mse {mean_loss.item() / world:.5f} held-out PSNR {quality:.2f} dB")

    if rank == 0:
        os.makedirs("out/g08", exist_ok=True)
        torch.save(model.module.export(), "out/g08/field.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
