"""Reference classification script: small convnet on scikit-learn digits.

    torchrun --standalone --nproc-per-node 2 d01.py --epochs 3
"""
import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", default=3, type=int)
    p.add_argument("-b", "--batch-size", default=32, type=int, help="images per process")
    p.add_argument("--lr", default=0.05, type=float)
    p.add_argument("--seed", default=7, type=int)
    p.add_argument("--resume", default="", type=str)
    p.add_argument("--output-dir", default="./out/d01", type=str)
    return p.parse_args()


class Digits(Dataset):
    def __init__(self, images, labels, augment):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = self.images[i]
        if self.augment:
            img = np.roll(img, (random.randint(-1, 1), random.randint(-1, 1)), axis=(0, 1))
        return torch.from_numpy(img.copy()).float().unsqueeze(0) / 16.0, int(self.labels[i])


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 16, 10))


def distribute_bn(model, world_size):
    for name, buf in model.named_buffers():
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buf, op=dist.ReduceOp.SUM)
            buf /= float(world_size)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    stats = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = model(x)
        stats[0] += F.cross_entropy(logits, y, reduction="sum").double()
        stats[1] += (logits.argmax(1) == y).sum()
        stats[2] += len(y)
    dist.all_reduce(stats)
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item(), int(stats[2])


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    os.makedirs(args.output_dir, exist_ok=True)

    data = load_digits()
    order = np.random.RandomState(args.seed).permutation(len(data.target))
    train_idx, val_idx = order[:1440], order[1440:]
    train_set = Digits(data.images[train_idx], data.target[train_idx], augment=True)
    val_set = Digits(data.images[val_idx], data.target[val_idx], augment=False)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), 64)

    random.seed(args.seed * 1000 + rank)
    torch.manual_seed(args.seed + rank)
    model = DistributedDataParallel(build_model())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(train_loader))

    start, best = 0, 0.0
    if args.resume:
        ckpt = torch.load(args.resume, map_location="cpu")
        model.module.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["optimizer"])
        sched.load_state_dict(ckpt["scheduler"])
        start, best = ckpt["epoch"] + 1, ckpt["best"]
        random.seed((args.seed + start) * 1000 + rank)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
        distribute_bn(model.module, world)
        val_loss, acc, seen = evaluate(model.module, val_loader)
        is_best, best = acc > best, max(best, acc)
        if rank == 0:
            print(f"epoch {epoch}: val loss {val_loss:.4f} acc {acc:.4f} on {seen} images")
            state = {"model": model.module.state_dict(), "optimizer": opt.state_dict(),
                     "scheduler": sched.state_dict(), "epoch": epoch, "best": best}
            torch.save(state, os.path.join(args.output_dir, "last.pth"))
            if is_best:
                torch.save(state, os.path.join(args.output_dir, "best.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
