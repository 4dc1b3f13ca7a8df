"""DDP with gradient accumulation and no_sync on a synthetic ranking task."""
import argparse
import contextlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Scorer(nn.Module):
    def __init__(self, dim=24, hidden=96):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
                                 nn.Linear(hidden, 1))

    def forward(self, pairs):
        return self.mlp(pairs).squeeze(-1)


def pair_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(24, generator=torch.Generator().manual_seed(77))
    pairs = torch.randn(n, 2, 24, generator=g)
    utility = torch.tanh(pairs @ w / 3) + 0.3 * pairs[..., 0] * pairs[..., 1]
    utility = utility + 0.2 * torch.randn(n, 2, generator=g)
    return TensorDataset(pairs, (utility[:, 0] > utility[:, 1]).float())


def pair_loss(scores, label, reduction="mean"):
    return F.binary_cross_entropy_with_logits(scores[:, 0] - scores[:, 1], label, reduction=reduction)


def train_epoch(model, loader, opt, sched, accum, device):
    model.train()
    n = len(loader)
    total = torch.zeros((), device=device)
    opt.zero_grad(set_to_none=True)
    for i, (pairs, label) in enumerate(loader):
        pairs, label = pairs.to(device), label.to(device)
        window = min(accum, n - (i // accum) * accum)
        boundary = (i + 1) % accum == 0
        with contextlib.nullcontext() if boundary else model.no_sync():
            loss = pair_loss(model(pairs), label)
            (loss / window).backward()
        total += loss.detach()
        if boundary or i + 1 == n:
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    return total.item() / (n * dist.get_world_size())


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    acc = torch.zeros(3, dtype=torch.float64, device=device)
    for pairs, label in loader:
        pairs, label = pairs.to(device), label.to(device)
        s = model.module(pairs)
        acc[0] += pair_loss(s, label, "sum")
        acc[1] += ((s[:, 0] > s[:, 1]) == (label > 0.5)).sum()
        acc[2] += len(label)
    dist.all_reduce(acc)
    return (acc[0] / acc[2]).item(), (acc[1] / acc[2]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--seed", type=int, default=13)
    ap.add_argument("--resume", default="")
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    use_gpu = torch.cuda.is_available()
    if use_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl" if use_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")

    train, val = pair_data(1120, 1), pair_data(301, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=128)

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Scorer().to(device), device_ids=[local_rank] if use_gpu else None)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    updates = -(-len(loader) // args.accum) * args.epochs
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=updates)

    start, best = 0, float("inf")
    if args.resume:
        ck = torch.load(args.resume, map_location=device, weights_only=True)
        model.module.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        sched.load_state_dict(ck["sched"])
        start, best = ck["epoch"] + 1, ck["best"]
    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="rank_")
        os.makedirs(out, exist_ok=True)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        train_loss = train_epoch(model, loader, opt, sched, args.accum, device)
        val_loss, acc = evaluate(model, val_loader, device)
        improved = val_loss < best
        best = min(best, val_loss)
        if rank == 0:
            print(f"epoch {epoch} train {train_loss:.4f} val {val_loss:.4f} acc {acc:.4f}")
            ck = {"model": model.module.state_dict(), "opt": opt.state_dict(),
                  "sched": sched.state_dict(), "epoch": epoch, "best": best}
            torch.save(ck, os.path.join(out, "last.pt"))
            if improved:
                torch.save(ck, os.path.join(out, "best.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
