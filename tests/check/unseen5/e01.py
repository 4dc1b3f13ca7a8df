"""Digit classification with a small conv net.

    torchrun --standalone --nproc-per-node 2 e01.py --epochs 3
"""
import argparse
import json
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--warmup-steps", type=int, default=10)
    p.add_argument("--seed", type=int, default=17)
    p.add_argument("--out", default="./out/e01")
    return p.parse_args()


class ConvNet(nn.Module):
    def __init__(self, width=24, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.body = nn.Sequential(
            nn.GroupNorm(4, width), nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width), nn.GELU(),
        )
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(2 * width * 16, num_classes)

    def forward(self, x):
        return self.fc(self.drop(self.body(self.stem(x)).flatten(1)))


def make_splits(seed):
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    y = torch.tensor(digits.target, dtype=torch.long)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    val, train = perm[:360], perm[360:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[val], y[val])


def lr_at(step, total, args):
    if step < args.warmup_steps:
        return (step + 1) / args.warmup_steps
    t = (step - args.warmup_steps) / max(1, total - args.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * t))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    stats = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = model(x)
        stats[0] += F.cross_entropy(logits, y, reduction="sum").item()
        stats[1] += (logits.argmax(1) == y).sum().item()
        stats[2] += y.numel()
        dist.all_reduce(stats)
    model.train()
    loss_sum, correct, count = stats.tolist()
    return loss_sum / count, correct / count


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)

    train_set, val_set = make_splits(args.seed)
    train_sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=val_sampler)

    model = DDP(ConvNet())
    torch.manual_seed(args.seed + 1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    total = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: lr_at(s, total, args))

    best, history = float("inf"), []
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

        val_loss, val_acc = evaluate(model, val_loader)
        history.append({"epoch": epoch, "val_loss": val_loss, "val_acc": val_acc})
        if rank == 0:
            print(f"epoch {epoch} val_loss {val_loss:.4f} val_acc {val_acc:.4f}")
            if val_loss < best:
                best = val_loss
                torch.save(model.module.state_dict(), os.path.join(args.out, "best.pt"))
            with open(os.path.join(args.out, "history.json"), "w") as f:
                json.dump(history, f, indent=2)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
