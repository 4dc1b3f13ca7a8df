"""Regression; the best weights are kept."""
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
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, x[:, :1].tanh() + 0.1 * torch.randn(n, 1, generator=g))


class Best:
    def __init__(self, path):
        self.path, self.error = path, float("inf")

    def offer(self, model, optimizer, epoch, error):
        if error < self.error:
            self.error = error
            if dist.get_rank() == 0:
                os.makedirs("kept", exist_ok=True)
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save({**state, "generator": torch.get_rng_state()}, self.path)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(2, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        sums += torch.stack([F.mse_loss(model(x), y, reduction="sum"), torch.tensor(float(len(x)), device=device)])
    model.train()
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
    train, val = rows(640, 1), rows(200, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    parts = DataLoader(val, 20, sampler=DistributedSampler(val, shuffle=False), num_workers=1, pin_memory=cuda)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    best = Best("kept/best.pt")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        error = evaluate(model.module, parts, device)
        seen = torch.tensor(float(len(sampler)), device=device)
        dist.all_reduce(seen)
        best.offer(model, optimizer, epoch, error)
        if rank == 0:
            print(f"epoch {epoch} best {best.error:.4f} after {int(seen.item())} rows", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
