"""Tabular regression (Friedman #1) with an embedding-free MLP, plateau schedule, frequent validation."""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import make_friedman1
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--val-every", type=int, default=6)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default="out/s12")
    return p.parse_args()


def get_data():
    x, y = make_friedman1(n_samples=2000, n_features=12, noise=1.0, random_state=5)
    mu, sd = y[:1600].mean(), y[:1600].std()
    x, y = x.astype(np.float32) * 2 - 1, ((y - mu) / sd).astype(np.float32)
    make = lambda s: TensorDataset(torch.from_numpy(x[s]), torch.from_numpy(y[s]))
    return make(slice(0, 1600)), make(slice(1600, 2000)), float(sd)


class MLP(nn.Module):
    def __init__(self, d_in, width=64):
        super().__init__()
        self.f = nn.Sequential(
            nn.Linear(d_in, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.f(x).squeeze(-1)


class Validator:
    def __init__(self, ds, batch_size):
        self.loader = DataLoader(ds, batch_size, sampler=DistributedSampler(ds, shuffle=False))

    @torch.no_grad()
    def __call__(self, net):
        was = net.training
        net.eval()
        se = n = 0.0
        for x, y in self.loader:
            se += (net(x) - y).pow(2).sum().item()
            n += len(y)
        net.train(was)
        return se / n


def across(value):
    t = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(t)
    return (t / dist.get_world_size()).item()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)

    train_ds, val_ds, scale = get_data()
    sampler = DistributedSampler(train_ds, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train_ds, args.batch_size, sampler=sampler, drop_last=True)
    validate = Validator(val_ds, 100)

    model = DDP(MLP(12))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1, threshold=1e-3)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)

    best, step = float("inf"), 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            step += 1
            if step % args.val_every == 0:
                val = validate(model.module)
                plateau.step(val)
                mse = across(val)
                if mse < best:
                    best = mse
                    if rank == 0:
                        torch.save({"model": model.module.state_dict(), "step": step}, f"{args.out}/best.pt")
        if rank == 0:
            print(f"epoch {epoch} step {step} rmse {scale * mse ** 0.5:.4f} best {scale * best ** 0.5:.4f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
