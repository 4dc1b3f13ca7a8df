"""Regression with dropout that can be resumed."""
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


PATH = "resume/last.pt"


def save(model, optimizer, epoch, rank):
    if rank == 0:
        os.makedirs("resume", exist_ok=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save({**state, "generator": torch.get_rng_state()}, PATH)
    dist.barrier()


def resume(model, optimizer):
    if not os.path.exists(PATH):
        return 0
    state = torch.load(PATH, map_location="cpu")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["generator"])
    return state["epoch"] + 1


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
    model = DDP(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)).to(device),
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(100 + rank)
    first = resume(model, optimizer)
    for epoch in range(first, first + 2):
        sampler.set_epoch(epoch)
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
        save(model, optimizer, epoch, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
