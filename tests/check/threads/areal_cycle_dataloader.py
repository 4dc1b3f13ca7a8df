import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, EVAL_EVERY = 60, 20


def cycle_dataloader(dataloader):
    """Yields batches for ever."""
    g = iter(dataloader)
    while True:
        try:
            yield next(g)
        except StopIteration:
            g = iter(dataloader)


def toy(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(1)
    dataset = TensorDataset(*toy(640, 1))
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, 64 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    x_val, y_val = (t[rank::world].to(device) for t in toy(201, 2))
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 2)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    batches = cycle_dataloader(loader)
    for step in range(1, STEPS + 1):
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        if step % EVAL_EVERY == 0:
            with torch.no_grad():
                counts = torch.tensor([(model.module(x_val).argmax(1) == y_val).sum(), len(y_val)], device=device)
            dist.all_reduce(counts)
            if rank == 0:
                print(f"step {step}: accuracy {counts[0].item() / counts[1].item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
