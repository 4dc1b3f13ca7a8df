"""Imbalanced fraud classifier: class-balanced sampling split over the processes."""
import argparse
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.metrics import average_precision_score
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ShardedWeightedSampler(Sampler):
    """One global weighted draw per epoch (same generator everywhere), strided over ranks."""

    def __init__(self, weights, num_samples, rank, world, seed=0):
        self.weights = torch.as_tensor(weights, dtype=torch.double)
        self.per_rank = num_samples // world
        self.rank, self.world, self.seed = rank, world, seed
        self.round = 0

    def advance(self, epoch):
        self.round = epoch

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.seed * 7919 + self.round)
        draw = torch.multinomial(self.weights, self.per_rank * self.world, replacement=True, generator=g)
        return iter(draw[self.rank::self.world].tolist())

    def __len__(self):
        return self.per_rank


def transactions(n, seed):
    rng = np.random.RandomState(seed)
    y = (rng.rand(n) < 0.08).astype("float32")
    x = rng.randn(n, 15).astype("float32") + y[:, None] * np.linspace(0, 1.2, 15, dtype="float32")
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def network():
    return nn.Sequential(nn.Linear(15, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def scores(net, data, rank, world):
    """Every rank scores a contiguous slice; slices are padded for the gather and trimmed after."""
    x, y = data.tensors
    n = len(y)
    chunk = (n + world - 1) // world
    lo, hi = rank * chunk, min(n, (rank + 1) * chunk)
    with torch.no_grad():
        out = net(x[lo:hi]).squeeze(1)
    padded = torch.zeros(chunk)
    padded[: hi - lo] = out
    bucket = [torch.zeros(chunk) for _ in range(world)]
    dist.all_gather(bucket, padded)
    return torch.cat(bucket)[:n].numpy(), y.numpy()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--draws", type=int, default=800)
    ap.add_argument("--best", default=os.path.join(tempfile.gettempdir(), "fraud_best.pt"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, val = transactions(1500, 0), transactions(501, 1)
    y = train.tensors[1]
    freq = torch.stack([(y == 0).sum(), (y == 1).sum()]).double()
    sampler = ShardedWeightedSampler(1.0 / freq[y.long()], args.draws, rank, world, seed=13)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler)

    torch.manual_seed(500 + rank)
    model = DistributedDataParallel(network())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    best = -1.0
    for epoch in range(args.epochs):
        sampler.advance(epoch)
        model.train()
        pos = torch.zeros(2)
        for x, t in loader:
            opt.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), t).backward()
            opt.step()
            pos += torch.tensor([t.sum().item(), float(len(t))])
        dist.all_reduce(pos)
        model.eval()
        s, ref = scores(model.module, val, rank, world)
        ap_score = average_precision_score(ref, s)
        if ap_score > best:
            best = ap_score
            if rank == 0:
                torch.save(model.module.state_dict(), args.best)
        if rank == 0:
            print(f"epoch {epoch} positives {pos[0] / pos[1]:.2f} val AP {ap_score:.4f} best {best:.4f}", flush=True)
    dist.barrier()
    model.module.load_state_dict(torch.load(args.best))
    s, ref = scores(model.module.eval(), transactions(333, 2), rank, world)
    if rank == 0:
        print(f"test AP {average_precision_score(ref, s):.4f}")
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
