"""Regression on noisy synthetic measurements, validating several times per epoch."""
import argparse
import csv
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Measurements(Dataset):
    def __init__(self, n, seed, noise=0.8):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 6, generator=g) * 4 - 2
        clean = torch.sin(self.x[:, 0] * 2) + self.x[:, 1] * self.x[:, 2] - 0.5 * self.x[:, 3].pow(2)
        self.y = clean + noise * torch.randn(n, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Regressor(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                 nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    sse, n = 0.0, 0
    for x, y in loader:
        sse += F.mse_loss(net(x), y, reduction="sum").item()
        n += len(y)
    net.train()
    return sse, n


def pooled(sse, n):
    t = torch.tensor([sse, n], dtype=torch.float64)
    dist.all_reduce(t)
    return (t[0] / t[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-2)
    ap.add_argument("--val-every", type=int, default=5)
    ap.add_argument("--seed", type=int, default=4)
    ap.add_argument("--out", default="./out/e10")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    train_set, val_set = Measurements(1280, seed=10), Measurements(240, seed=11)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    val_loader = DataLoader(val_set, 60, sampler=DistributedSampler(val_set, shuffle=False))

    model = DDP(Regressor())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, min_lr=1e-4)

    best, rows, step = float("inf"), [], 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.val_every:
                continue
            sse, n = evaluate(model.module, val_loader)
            scheduler.step(sse / n)
            val_mse = pooled(sse, n)
            lr = optimizer.param_groups[0]["lr"]
            rows.append((step, val_mse, lr))
            if val_mse < best:
                best = val_mse
                if rank == 0:
                    os.makedirs(args.out, exist_ok=True)
                    torch.save({"model": model.module.state_dict(), "step": step}, os.path.join(args.out, "best.pt"))
        if rank == 0:
            print(f"epoch {epoch}: step {step} val_mse {rows[-1][1]:.4f} best {best:.4f} lr {rows[-1][2]:.5f}")

    if rank == 0:
        with open(os.path.join(args.out, "val.csv"), "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(["step", "val_mse", "lr"])
            writer.writerows(rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
