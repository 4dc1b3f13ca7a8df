"""Regression with missing targets; the mean of a step is that over the targets which all ranks have."""
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    keep = (torch.rand(n, 1, generator=g) < 0.3 + 0.5 * (x[:, :1] > 0)).float()
    return TensorDataset(x, (x[:, :3].sum(1, keepdim=True)).sin(), keep)


def score(net, data, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, keep = (t[rank::world].to(device) for t in data.tensors)
    with torch.no_grad():
        sums = torch.stack([((net(x) - y).square() * keep).sum(), keep.sum()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = rows(768, 1), rows(200, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            x, y, keep = (t.to(device) for t in batch)
            count = keep.sum()
            dist.all_reduce(count)
            errors = F.mse_loss(model(x), y, reduction="none") * keep
            loss = errors.sum() * world / count.clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        error = score(net, val, device)
        if rank == 0:
            print(f"epoch {epoch} error {error:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
