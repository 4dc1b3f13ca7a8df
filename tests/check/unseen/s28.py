"""Small CNN on digits with gradient accumulation."""
import argparse
import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--micro-batch", type=int, default=16)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=7)
    return p.parse_args()


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 16, 3, padding=1)
        self.n1 = nn.GroupNorm(4, 16)
        self.c2 = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.n2 = nn.GroupNorm(4, 32)
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, x):
        x = F.relu(self.n1(self.c1(x)))
        x = F.relu(self.n2(self.c2(x)))
        return self.head(x.flatten(1))


def get_data(seed):
    X, y = load_digits(return_X_y=True)
    X = (X / 16.0).reshape(-1, 1, 8, 8)
    Xtr, Xte, ytr, yte = train_test_split(X, y, test_size=0.2, random_state=seed, stratify=y)
    conv = lambda a, b: TensorDataset(torch.tensor(a).float(), torch.tensor(b).long())
    return conv(Xtr, ytr), conv(Xte, yte)


@torch.no_grad()
def evaluate(model, ds, device, rank, world):
    model.eval()
    idx = torch.arange(rank, len(ds), world)
    x, y = ds.tensors[0][idx].to(device), ds.tensors[1][idx].to(device)
    logits = model(x)
    out = torch.tensor(
        [F.cross_entropy(logits, y, reduction="sum").item(), (logits.argmax(1) == y).sum().item(), float(len(y))],
        dtype=torch.float64, device=device)
    dist.all_reduce(out)
    return (out[0] / out[2]).item(), (out[1] / out[2]).item()


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(f"cuda:{local}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(local)

    train_ds, test_ds = get_data(args.seed)
    sampler = DistributedSampler(train_ds, num_replicas=world, rank=rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train_ds, batch_size=args.micro_batch, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    raw = ConvNet().to(device)
    model = DistributedDataParallel(raw, device_ids=[local] if cuda else None)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    n_micro = len(loader)
    updates_per_epoch = math.ceil(n_micro / args.accum)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=updates_per_epoch * args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        opt.zero_grad()
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            last_of_window = (i + 1) % args.accum == 0 or (i + 1) == n_micro
            # the final window of an epoch may be shorter
            window_start = (i // args.accum) * args.accum
            window = min(args.accum, n_micro - window_start)
            ctx = contextlib.nullcontext() if last_of_window else model.no_sync()
            with ctx:
                loss = F.cross_entropy(model(x), y) / window
                loss.backward()
            if last_of_window:
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        vloss, vacc = evaluate(raw, test_ds, device, rank, world)
        if rank == 0:
            print(f"[{epoch + 1}/{args.epochs}] test loss {vloss:.4f} acc {vacc:.4f} lr {sched.get_last_lr()[0]:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
