import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class VelocityNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None]], 1))


def flow_loss(model, actions, noise, t):
    x_t = (1 - t[:, None]) * actions + t[:, None] * noise
    return F.mse_loss(model(x_t, t), noise - actions)


def moons(n, seed):
    a = torch.rand(n, generator=torch.Generator().manual_seed(seed)) * torch.pi
    return torch.stack([a.cos(), a.sin()], 1)


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    set_seed(42)
    train = TensorDataset(moons(1280, 1))
    sampler = DistributedSampler(train, seed=42)
    loader = DataLoader(train, 64 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    model = DDP(VelocityNet().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    held_out = moons(200, 2)
    g = torch.Generator().manual_seed(3)
    val_noise, val_t = torch.randn(200, 2, generator=g), torch.rand(200, generator=g)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (actions,) in loader:
            actions = actions.to(device)
            noise = torch.randn_like(actions)
            t = torch.rand(len(actions), device=device)
            optimizer.zero_grad()
            flow_loss(model, actions, noise, t).backward()
            optimizer.step()
        with torch.no_grad():
            val = flow_loss(model.module, *(v[rank::world].to(device) for v in (held_out, val_noise, val_t)))
        dist.all_reduce(val)
        if rank == 0:
            print(f"epoch {epoch}: held-out loss {val.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
