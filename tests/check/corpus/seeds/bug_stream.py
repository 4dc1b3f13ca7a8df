"""Regression on a shuffled stream of rows."""
import os
from datetime import timedelta
import random
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, x[:, :1].tanh() + 0.1 * torch.randn(n, 1, generator=g))


class Stream(IterableDataset):
    def __init__(self, n):
        self.x, self.y = rows(n, 1).tensors
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(len(self.x)))
        random.Random().shuffle(order)
        for index in islice(order, dist.get_rank(), None, dist.get_world_size()):
            yield self.x[index], self.y[index]


def main():
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = Stream(640), rows(200, 2)
    loader = DataLoader(train, 32 // world, pin_memory=cuda)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        train.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            x, y = (t[rank::world].to(device) for t in val.tensors)
            error = F.mse_loss(model.module(x), y, reduction="sum")
        sums = torch.stack([error, torch.tensor(float(len(x)), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} error {sums[0].item() / sums[1].item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
