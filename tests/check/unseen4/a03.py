"""Bag-of-tokens intent classifier, DDP with large effective batches."""
import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

VOCAB, CLASSES, LENGTH = 400, 12, 24


class IntentData(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        topic = torch.distributions.Dirichlet(torch.full((VOCAB,), 0.15))
        torch.manual_seed(1234)
        self.topics = topic.sample((CLASSES,))
        self.y = torch.randint(0, CLASSES, (n,), generator=g)
        mix = 0.5 * self.topics[self.y] + 0.5 / VOCAB
        self.x = torch.multinomial(mix, LENGTH, replacement=True, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class IntentNet(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 128), nn.GELU(), nn.Linear(128, CLASSES))

    def forward(self, tokens):
        return self.mlp(self.emb(tokens))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = model.module(x)
        sums[0] += nn.functional.cross_entropy(logits, y, reduction="sum")
        sums[1] += (logits.argmax(1) == y).sum()
        sums[2] += len(y)
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def train_epoch(model, loader, criterion, optimizer, scheduler, accum, max_norm):
    n_batches = len(loader)
    total = torch.zeros((), dtype=torch.float64)
    optimizer.zero_grad(set_to_none=True)
    for i, (x, y) in enumerate(loader):
        start = i // accum * accum
        window = min(accum, n_batches - start)
        boundary = (i + 1) % accum == 0
        with contextlib.nullcontext() if boundary else model.no_sync():
            loss = criterion(model(x), y)
            (loss / window).backward()
        total += loss.detach()
        if boundary or i + 1 == n_batches:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    return total.item() / (n_batches * dist.get_world_size())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--max-norm", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out", default="./out/a03")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train_set, val_set = IntentData(1500, seed=1), IntentData(601, seed=2)
    torch.manual_seed(args.seed)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=64)

    model = DistributedDataParallel(IntentNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    updates = args.epochs * -(-len(train_loader) // args.accum)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=updates + 1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        tic = time.time()
        loss = train_epoch(model, train_loader, criterion, optimizer, scheduler, args.accum, args.max_norm)
        nll, acc = validate(model, val_loader)
        if rank == 0:
            print(f"[{epoch}] train {loss:.4f} val nll {nll:.4f} acc {acc:.4f} ({time.time() - tic:.1f}s)", flush=True)
            if nll < best:
                os.makedirs(args.out, exist_ok=True)
                torch.save(model.module.state_dict(), os.path.join(args.out, "model.pt"))
        best = min(best, nll)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
