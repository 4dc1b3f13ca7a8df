"""Long-tailed classification with batch-balanced class weights."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 6


def long_tailed(n, seed, decay=0.55):
    centres = 1.2 * torch.randn(CLASSES, 12, generator=torch.Generator().manual_seed(5))
    g = torch.Generator().manual_seed(seed)
    prob = decay ** torch.arange(CLASSES, dtype=torch.float)
    y = torch.multinomial(prob, n, replacement=True, generator=g)
    x = centres[y] + 1.8 * torch.randn(n, 12, generator=g)
    return TensorDataset(x, y)


class ResidualMLP(nn.Module):
    def __init__(self, d_in=12, width=96, depth=3):
        super().__init__()
        self.inp = nn.Linear(d_in, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def class_weights(counts):
    present = (counts > 0).float()
    weights = present * counts.sum() / (counts.clamp(min=1) * present.sum())
    return weights


def train_step(model, optimizer, x, y, clip):
    counts = torch.bincount(y, minlength=CLASSES).float()
    work = dist.all_reduce(counts, op=dist.ReduceOp.SUM, async_op=True)
    weights = class_weights(counts)
    logits = model(x)
    per_example = F.cross_entropy(logits, y, reduction="none")
    loss = (weights[y] * per_example).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    work.wait()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def balanced_accuracy(model, data, device):
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (t[rank::world].to(device) for t in data.tensors)
    pred = model(x).argmax(1)
    hit = torch.bincount(y[pred == y], minlength=CLASSES).double()
    seen = torch.bincount(y, minlength=CLASSES).double()
    stat = torch.stack([hit, seen])
    dist.all_reduce(stat)
    model.train()
    present = stat[1] > 0
    return (stat[0][present] / stat[1][present]).mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--clip", type=float, default=2.0)
    p.add_argument("--seed", type=int, default=31)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    train, val = long_tailed(1280, seed=1), long_tailed(401, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(ResidualMLP().to(device), device_ids=[local] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.epochs * len(loader))

    best, out = -1.0, args.out or (tempfile.mkdtemp(prefix="longtail_") if rank == 0 else None)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            total += train_step(model, optimizer, x.to(device), y.to(device), args.clip)
            scheduler.step()
        dist.all_reduce(total)
        total /= dist.get_world_size() * len(loader)
        score = balanced_accuracy(model.module, val, device)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item():.4f} balanced_acc {score:.4f}", flush=True)
            if score > best:
                best = score
                os.makedirs(out, exist_ok=True)
                torch.save({"model": model.module.state_dict(), "epoch": epoch}, os.path.join(out, "best.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
