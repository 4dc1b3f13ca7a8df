"""Digits convnet. Validation and early stopping are decided by rank 0, resumable with --resume."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class ShiftedDigits(Dataset):
    def __init__(self, images, labels, augment):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        x = self.images[i]
        if self.augment:
            dy, dx = torch.randint(-1, 2, (2,)).tolist()
            x = torch.roll(x, (dy, dx), (1, 2)) + 0.05 * torch.randn_like(x)
        return x, self.labels[i]


def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 16, 10))


def distribute_bn(model):
    for name, buf in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            dist.all_reduce(buf)
            buf /= dist.get_world_size()


@torch.no_grad()
def validate(net, loader):
    net.eval()
    loss, hit, n = 0.0, 0, 0
    for x, y in loader:
        out = net(x)
        loss += F.cross_entropy(out, y, reduction="sum").item()
        hit += (out.argmax(1) == y).sum().item()
        n += len(y)
    net.train()
    return loss / n, hit / n


def save(path, rank, model, opt, sched, extra):
    os.makedirs(path, exist_ok=True)
    torch.save(torch.get_rng_state(), os.path.join(path, f"rng_{rank}.pt"))
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                    **extra}, os.path.join(path, "state.pt"))
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--patience", type=int, default=2)
    ap.add_argument("--seed", type=int, default=2)
    ap.add_argument("--out", default="out/digits")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    tr, va = perm[:1400], perm[1400:]
    train_set = ShiftedDigits(x[tr], y[tr], augment=True)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch, sampler=sampler, drop_last=True)
    val_loader = DataLoader(ShiftedDigits(x[va], y[va], augment=False), batch_size=128) if rank == 0 else None

    torch.manual_seed(args.seed)
    model = DDP(build())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=0)
    torch.manual_seed(args.seed * 7 + rank + 1)

    start, best, bad = 0, float("inf"), 0
    if args.resume:
        state = torch.load(os.path.join(args.out, "state.pt"), weights_only=True)
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        start, best, bad = state["epoch"] + 1, state["best"], state["bad"]
        torch.set_rng_state(torch.load(os.path.join(args.out, f"rng_{rank}.pt")))

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for i, (bx, by) in enumerate(train_loader):
            loss = F.cross_entropy(model(bx), by, label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0 and i % 10 == 0:
                print(f"epoch {epoch} it {i} loss (rank 0) {loss.item():.4f}", flush=True)

        distribute_bn(model.module)
        verdict = torch.zeros(2, dtype=torch.float64)
        if rank == 0:
            verdict[0], verdict[1] = validate(model.module, val_loader)
            print(f"epoch {epoch} val loss {verdict[0]:.4f} acc {verdict[1]:.4f}", flush=True)
        dist.broadcast(verdict, src=0)
        val_loss = verdict[0].item()
        sched.step(val_loss)
        bad = 0 if val_loss < best else bad + 1
        best = min(best, val_loss)
        save(args.out, rank, model, opt, sched, {"epoch": epoch, "best": best, "bad": bad})
        if bad >= args.patience:
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
