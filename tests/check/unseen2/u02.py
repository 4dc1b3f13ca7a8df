import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class SequenceCopy(Dataset):
    """Predict the token seen `lag` positions ago."""

    def __init__(self, n=512, length=12, vocab=16, lag=2, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randint(0, vocab, (n, length), generator=g)
        self.lag = lag

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        y = torch.full_like(x, -100)
        y[self.lag:] = x[:-self.lag]
        return x, y


class TinyGRU(nn.Module):
    def __init__(self, vocab=16, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, vocab))

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.mlp(h)


class BucketedAverager:
    """Averages gradients over the group in size-capped buckets, overlapping the transfers."""

    def __init__(self, module, cap_bytes=8192, group=None):
        self.group = group
        self.world = dist.get_world_size(group)
        self.buckets = self._assign([p for p in module.parameters() if p.requires_grad], cap_bytes)
        for t in list(module.parameters()) + list(module.buffers()):
            dist.broadcast(t.detach(), src=0, group=group)

    @staticmethod
    def _assign(params, cap):
        buckets, cur, size = [], [], 0
        for p in reversed(params):
            nbytes = p.numel() * p.element_size()
            if cur and size + nbytes > cap:
                buckets.append(cur)
                cur, size = [], 0
            cur.append(p)
            size += nbytes
        if cur:
            buckets.append(cur)
        return buckets

    @torch.no_grad()
    def average(self):
        flats = []
        work = None
        for bucket in self.buckets:
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
            flat = _flatten_dense_tensors(grads).div_(self.world)
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            flats.append((bucket, grads, flat))
        if work is not None:
            work.wait()
        for bucket, grads, flat in flats:
            for p, g in zip(bucket, _unflatten_dense_tensors(flat, grads)):
                p.grad = g.clone()


def accuracy(model, dataset, rank, world, bs=64):
    model.eval()
    stat = torch.zeros(2, dtype=torch.float64)
    idx = list(range(rank, len(dataset), world))
    loader = DataLoader(torch.utils.data.Subset(dataset, idx), batch_size=bs)
    with torch.no_grad():
        for x, y in loader:
            mask = y != -100
            stat[0] += (model(x).argmax(-1)[mask] == y[mask]).sum()
            stat[1] += mask.sum()
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--bucket-kb", type=int, default=8)
    cfg = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)

    train, val = SequenceCopy(), SequenceCopy(n=130, seed=4)
    model = TinyGRU()
    averager = BucketedAverager(model, cfg.bucket_kb * 1024)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=cfg.bs, sampler=sampler, drop_last=True)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg.lr, total_steps=cfg.epochs * len(loader))
    ce = nn.CrossEntropyLoss(ignore_index=-100)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        t0, running = time.time(), torch.zeros(())
        for x, y in loader:
            opt.zero_grad()
            loss = ce(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            averager.average()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            running += loss.detach()
        running /= len(loader) * world
        dist.all_reduce(running)
        acc = accuracy(model, val, rank, world)
        if rank == 0:
            print(f"[{epoch}] loss={running.item():.4f} val_acc={acc:.3f} ({time.time() - t0:.1f}s)", flush=True)

    if rank == 0 and os.environ.get("SAVE_TO"):
        torch.save(model.state_dict(), os.environ["SAVE_TO"])
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
