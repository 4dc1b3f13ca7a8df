"""Regression without a wrapper: gradients are averaged after the backward pass."""
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, x[:, :1].tanh() + 0.1 * torch.randn(n, 1, generator=g))


def average_gradients(model, world):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def main():
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = rows(640, 1), rows(200, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            average_gradients(model, world)
            optimizer.step()
        with torch.no_grad():
            x, y = (t[rank::world].to(device) for t in val.tensors)
            error = F.mse_loss(model(x), y, reduction="sum")
        sums = torch.stack([error, torch.tensor(float(len(x)), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} error {sums[0].item() / sums[1].item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
