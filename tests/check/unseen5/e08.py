"""Imbalanced tabular classification: balanced sampling, standardised inputs, balanced accuracy."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

CLASSES, DIM = 4, 16
PRIOR = torch.tensor([0.7, 0.2, 0.07, 0.03])


def generate(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.multinomial(PRIOR, n, replacement=True, generator=g)
    means = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(77))
    x = 5.0 + 3.0 * (means[y] + 1.2 * torch.randn(n, DIM, generator=g))
    return x, y


def global_moments(x):
    """Mean and standard deviation of all rows; every process scans a part of them."""
    part = x[dist.get_rank() :: dist.get_world_size()].double()
    acc = torch.cat([part.sum(0), part.pow(2).sum(0), torch.tensor([float(len(part))]).double()])
    dist.all_reduce(acc)
    n = acc[-1]
    mean = acc[:DIM] / n
    std = (acc[DIM : 2 * DIM] / n - mean.pow(2)).clamp_min(1e-12).sqrt()
    return mean.float(), std.float()


class MLP(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.net = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(),
                                 nn.Linear(64, CLASSES))

    def forward(self, x):
        return self.net((x - self.mean) / self.std)


@torch.no_grad()
def confusion(net, x, y, batch=128):
    rank, world = dist.get_rank(), dist.get_world_size()
    net.eval()
    mat = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
    lo, hi = rank * len(x) // world, (rank + 1) * len(x) // world
    for i in range(lo, hi, batch):
        j = min(i + batch, hi)
        pred = net(x[i:j]).argmax(1)
        mat += torch.bincount(y[i:j] * CLASSES + pred, minlength=CLASSES**2).view(CLASSES, CLASSES)
    net.train()
    dist.all_reduce(mat)
    return mat


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--samples-per-epoch", type=int, default=1600)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out", default="./out/e08")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = generate(2001, seed=1)
    xv, yv = generate(801, seed=2)

    weights = 1.0 / torch.bincount(y, minlength=CLASSES).clamp_min(1).double()
    sampler = WeightedRandomSampler(
        weights[y], num_samples=args.samples_per_epoch // world, replacement=True,
        generator=torch.Generator().manual_seed(args.seed * 4096 + 1000 + rank),
    )
    loader = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    model = DDP(MLP(*global_moments(x)))
    torch.manual_seed(args.seed + 50 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.3, patience=0)

    best, history = -1.0, []
    for epoch in range(args.epochs):
        loss_sum = torch.zeros(())
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        mean_loss = loss_sum / len(loader)
        dist.reduce(mean_loss, dst=0)
        mat = confusion(model.module, xv, yv).double()
        balanced = (mat.diag() / mat.sum(1).clamp_min(1)).mean().item()
        scheduler.step(balanced)
        if rank == 0:
            history.append({"epoch": epoch, "loss": mean_loss.item() / world, "balanced_acc": balanced,
                            "n_val": int(mat.sum())})
            print(history[-1])
            if balanced > best:
                os.makedirs(args.out, exist_ok=True)
                torch.save(model.module.state_dict(), os.path.join(args.out, "best.pt"))
        best = max(best, balanced)

    if rank == 0:
        with open(os.path.join(args.out, "history.json"), "w") as f:
            json.dump(history, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
