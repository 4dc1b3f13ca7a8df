"""Small CNN on the 8x8 digits, two processes, gradient accumulation and weight averaging."""
import contextlib
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

OUT = "out/s01"
SEED, EPOCHS, BATCH, ACCUM, PATIENCE = 11, 4, 16, 3, 2


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
        )
        self.head = nn.Linear(2 * width * 16, 10)

    def forward(self, x):
        return self.head(self.body(x))


def jitter(x):
    """Shift every picture of the batch by up to one pixel, add a little noise."""
    dy, dx = torch.randint(-1, 2, (2,)).tolist()
    return torch.roll(x, (dy, dx), dims=(2, 3)) + 0.05 * torch.randn_like(x)


def load():
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    xa, xb, ya, yb = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    wrap = lambda a, b: TensorDataset(torch.from_numpy(a), torch.from_numpy(b).long())
    return wrap(xa, ya), wrap(xb, yb)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        hits[0] += (model(x).argmax(1) == y).sum()
        hits[1] += len(y)
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)
    if rank == 0:
        os.makedirs(OUT, exist_ok=True)

    train_set, test_set = load()
    sampler = DistributedSampler(train_set, shuffle=True, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), 64)

    model = DDP(Net())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    n = len(loader)
    best, stale = -1.0, 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            first = i - i % ACCUM
            window = min(ACCUM, n - first)
            closing = i == first + window - 1
            with contextlib.nullcontext() if closing else model.no_sync():
                loss = F.cross_entropy(model(jitter(x)), y) / window
                loss.backward()
            if closing:
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
                ema.update_parameters(model.module)
        acc = accuracy(ema, test_loader)
        if rank == 0:
            print(f"epoch {epoch} accuracy {acc:.4f}")
        if acc > best:
            best, stale = acc, 0
            if rank == 0:
                torch.save(ema.module.state_dict(), f"{OUT}/best.pt")
        else:
            stale += 1
            if stale >= PATIENCE:
                break

    dist.barrier()
    final = Net()
    final.load_state_dict(torch.load(f"{OUT}/best.pt"))
    acc = accuracy(final, test_loader)
    if rank == 0:
        print(f"best {best:.4f}, reloaded {acc:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
