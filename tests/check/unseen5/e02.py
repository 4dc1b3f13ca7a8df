"""Softmax + center loss (Wen et al.) on digits, with gradient accumulation."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 3
MICRO_BATCH = 16
ACCUM = 3
CENTER_WEIGHT = 0.05
SEED = 5
OUT = "./out/e02"


class Embedder(nn.Module):
    def __init__(self, dim=16, classes=10):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        z = self.trunk(x)
        return z, self.head(F.relu(z))


class CenterLoss(nn.Module):
    def __init__(self, classes=10, dim=16):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, dim))

    def forward(self, z, y):
        return (z - self.centers[y]).pow(2).sum(1).mean()


def load():
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    y = torch.tensor(digits.target)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    train, val = perm[357:], perm[:357]
    return TensorDataset(x[train], y[train]), TensorDataset(x[val], y[val])


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = count = 0
    for x, y in loader:
        correct += (model(x)[1].argmax(1) == y).sum().item()
        count += y.numel()
    model.train()
    stats = torch.tensor([correct, count])
    dist.all_reduce(stats)
    return stats[0].item() / stats[1].item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    train_set, val_set = load()
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=MICRO_BATCH, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=64)

    net = Embedder()
    center_loss = CenterLoss()
    model = DDP(net)
    torch.manual_seed(SEED * 1000 + rank)

    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt_center = torch.optim.SGD(center_loss.parameters(), lr=0.5)
    n_batches = len(train_loader)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for i, (x, y) in enumerate(train_loader):
            last = (i + 1) % ACCUM == 0 or i + 1 == n_batches
            group = min(ACCUM, n_batches - (i // ACCUM) * ACCUM)
            ctx = contextlib.nullcontext() if last else model.no_sync()
            with ctx:
                z, logits = model(x)
                loss = F.cross_entropy(logits, y) + CENTER_WEIGHT * center_loss(z, y)
                (loss / group).backward()
            running += torch.tensor([loss.item(), 1.0])
            if not last:
                continue
            for p in center_loss.parameters():
                dist.all_reduce(p.grad)
                p.grad.div_(world * CENTER_WEIGHT)
            opt.step()
            opt_center.step()
            opt.zero_grad(set_to_none=True)
            opt_center.zero_grad(set_to_none=True)

        dist.all_reduce(running)
        acc = evaluate(model.module, val_loader)
        if rank == 0:
            print(f"[{epoch}] train {running[0] / running[1]:.4f} val_acc {acc:.4f}")

    if rank == 0:
        os.makedirs(OUT, exist_ok=True)
        torch.save({"model": model.module.state_dict(), "centers": center_loss.state_dict()}, f"{OUT}/final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
