"""Semantic segmentation of synthetic scenes with a small U-Net.

Usage: torchrun --standalone --nproc-per-node 2 b07.py --epochs 3
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = ["background", "disk", "box", "stripe", "dot"]


class Scenes(Dataset):
    def __init__(self, n, seed, size=24):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        r = lambda lo, hi: int(torch.randint(lo, hi, (1,), generator=g))
        self.masks = torch.zeros(n, size, size, dtype=torch.long)
        for m in self.masks:
            m[(yy - r(6, 18)) ** 2 + (xx - r(6, 18)) ** 2 < r(9, 30)] = 1
            y0, x0 = r(0, 16), r(0, 16)
            m[y0:y0 + r(4, 8), x0:x0 + r(4, 8)] = 2
            if r(0, 10) < 2:
                m[r(0, size)] = 3
            if r(0, 20) < 1:
                y0, x0 = r(1, 20), r(1, 20)
                m[y0:y0 + 3, x0:x0 + 3] = 4
        palette = torch.randn(len(CLASSES), 3, generator=torch.Generator().manual_seed(99))
        self.images = palette[self.masks].permute(0, 3, 1, 2) + 0.8 * torch.randn(n, 3, size, size, generator=g)

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, i):
        return self.images[i], self.masks[i]


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU())


class TinyUNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.d1, self.d2 = conv(3, c), conv(c, 2 * c)
        self.u1 = conv(3 * c, c)
        self.head = nn.Conv2d(c, len(CLASSES), 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        up = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.head(self.u1(torch.cat([a, up], 1)))


class ConfusionMatrix:
    def __init__(self, n):
        self.n = n
        self.mat = torch.zeros(n, n, dtype=torch.float64)

    def update(self, target, pred):
        k = target.flatten() * self.n + pred.flatten()
        self.mat += torch.bincount(k, minlength=self.n ** 2).reshape(self.n, self.n)

    def compute(self):
        tp = self.mat.diag()
        union = self.mat.sum(0) + self.mat.sum(1) - tp
        present = union > 0
        return {"miou": (tp[present] / union[present]).mean(), "pixel_acc": tp.sum() / self.mat.sum()}


def reduce_dict(d):
    """Average every value over the processes (torchvision references, utils.py)."""
    keys = sorted(d)
    values = torch.stack([d[k] for k in keys])
    dist.all_reduce(values)
    values /= dist.get_world_size()
    return dict(zip(keys, values.tolist()))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    cm = ConfusionMatrix(len(CLASSES))
    for image, target in loader:
        cm.update(target, model(image).argmax(1))
    return reduce_dict(cm.compute())


def train_one_epoch(model, opt, sched, loader, epoch, rank):
    model.train()
    for i, (image, target) in enumerate(loader):
        loss = F.cross_entropy(model(image), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if i % 5 == 0:
            mean_loss = reduce_dict({"loss": loss.detach()})["loss"]
            if rank == 0:
                print(f"[{epoch}] {i}/{len(loader)} loss {mean_loss:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    train_set, val_set = Scenes(640, seed=1), Scenes(120, seed=2)
    train_sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=20, sampler=val_sampler)

    model = DistributedDataParallel(TinyUNet())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    total = args.epochs * len(train_loader)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=total, power=0.9)

    best = 0.0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, opt, sched, train_loader, epoch, rank)
        stats = evaluate(model, val_loader)
        if rank == 0:
            print(f"[{epoch}] " + " ".join(f"{k} {v:.4f}" for k, v in stats.items()), flush=True)
            state = {"model": model.module.state_dict(), "epoch": epoch, **stats}
            os.makedirs(args.output, exist_ok=True)
            torch.save(state, os.path.join(args.output, "last.pth"))
            if stats["miou"] > best:
                best = stats["miou"]
                torch.save(state, os.path.join(args.output, "best.pth"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="out/seg")
    main(parser.parse_args())
