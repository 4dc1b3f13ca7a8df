"""Small ResNet on digits: BatchNorm, EMA weights, bf16 autocast, resumable.

    torchrun --standalone --nproc-per-node 2 a06.py [--resume out/a06/last.pt]
"""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.b1, self.b2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x):
        h = F.relu(self.b1(self.c1(x)))
        return F.relu(x + self.b2(self.c2(h)))


def build_model(width=16):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), ResBlock(width), nn.MaxPool2d(2), ResBlock(width),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )


class ModelEMA:
    def __init__(self, model, decay=0.97):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def copy_buffers(self, model):
        for e, b in zip(self.module.buffers(), model.buffers()):
            e.copy_(b)


def distribute_bn(model, world):
    for name, buf in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            dist.all_reduce(buf)
            buf /= world


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    stat = torch.zeros(2, dtype=torch.float64)
    for xb, yb in zip(x.split(64), y.split(64)):
        stat[0] += (model(xb).argmax(1) == yb).sum()
        stat[1] += len(yb)
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def augment(x, g):
    x = x + 0.05 * torch.randn(x.shape, generator=g)
    dx, dy = torch.randint(-1, 2, (2,), generator=g).tolist()
    return torch.roll(x, (dx, dy), (2, 3))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--out", default="./out/a06")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(y)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    tr, va = perm[:1408], perm[1408:][rank::world]
    train_set = TensorDataset(x[tr], y[tr])
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    net = build_model()
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * len(loader) + 1)
    ema = ModelEMA(net)
    start, best = 0, 0.0
    if args.resume:
        ckpt = torch.load(args.resume, map_location="cpu")
        net.load_state_dict(ckpt["model"])
        ema.module.load_state_dict(ckpt["ema"])
        opt.load_state_dict(ckpt["opt"])
        sched.load_state_dict(ckpt["sched"])
        start, best = ckpt["epoch"] + 1, ckpt["best"]
    model = DDP(net, broadcast_buffers=False)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        aug_rng = torch.Generator().manual_seed(args.seed + 1000 * epoch + rank)
        model.train()
        for xb, yb in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(augment(xb, aug_rng)).float(), yb)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            ema.update(net)
        distribute_bn(net, world)
        ema.copy_buffers(net)
        acc, ema_acc = evaluate(net, x[va], y[va]), evaluate(ema.module, x[va], y[va])
        improved = ema_acc > best
        best = max(best, ema_acc)
        if rank == 0:
            print(f"epoch {epoch} acc {acc:.4f} ema acc {ema_acc:.4f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            ckpt = {"model": net.state_dict(), "ema": ema.module.state_dict(), "opt": opt.state_dict(),
                    "sched": sched.state_dict(), "epoch": epoch, "best": best}
            torch.save(ckpt, os.path.join(args.out, "last.pt"))
            if improved:
                torch.save(ema.module.state_dict(), os.path.join(args.out, "best_ema.pt"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
