#!/usr/bin/env python
# SimCLR-style pretraining on the sklearn digits, followed by a linear probe.
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch.nn.parallel import DistributedDataParallel as DDP

SEED, EPOCHS, LOCAL_BATCH, TEMP = 11, 4, 48, 0.3


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        lo = dist.get_rank() * ctx.rows
        return grad[lo:lo + ctx.rows]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 16, 64),
        )
        self.proj = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        h = self.body(x)
        return h, F.normalize(self.proj(h), dim=1)


def augment(x, g):
    dx, dy = torch.randint(-1, 2, (2,), generator=g).tolist()
    x = torch.roll(x, (dy, dx), (2, 3))
    gain = 0.7 + 0.6 * torch.rand(len(x), 1, 1, 1, generator=g)
    drop = (torch.rand(x.shape, generator=g) > 0.1).float()
    return x * gain * drop + 0.1 * torch.randn(x.shape, generator=g)


def nt_xent(za, zb):
    """Rows: this process' anchors. Columns: every view on every process."""
    rank, n = dist.get_rank(), len(za)
    total = n * dist.get_world_size()
    bank = torch.cat([Gather.apply(za), Gather.apply(zb)])
    here = rank * n + torch.arange(n)
    sim_a, sim_b = za @ bank.T / TEMP, zb @ bank.T / TEMP
    rows = torch.arange(n)
    mask_a = torch.zeros_like(sim_a, dtype=torch.bool)
    mask_b = torch.zeros_like(sim_b, dtype=torch.bool)
    mask_a[rows, here] = True
    mask_b[rows, here + total] = True
    sim_a = sim_a.masked_fill(mask_a, float("-inf"))
    sim_b = sim_b.masked_fill(mask_b, float("-inf"))
    return 0.5 * (F.cross_entropy(sim_a, here + total) + F.cross_entropy(sim_b, here))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16.0
    labels = digits.target
    order = np.random.RandomState(SEED).permutation(len(images))
    test_ids, train_ids = order[:360], order[360:]
    train = images[torch.from_numpy(train_ids)]

    torch.manual_seed(SEED)
    model = DDP(Encoder())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    aug_rng = torch.Generator().manual_seed(SEED * 100 + rank)
    shuffle_rng = torch.Generator().manual_seed(SEED)

    step_batch = LOCAL_BATCH * world
    per_epoch = len(train) // step_batch
    for epoch in range(EPOCHS):
        perm = torch.randperm(len(train), generator=shuffle_rng)
        meter = torch.zeros(1)
        for s in range(per_epoch):
            chunk = perm[s * step_batch:(s + 1) * step_batch]
            x = train[chunk[rank::world]]
            _, z = model(torch.cat([augment(x, aug_rng), augment(x, aug_rng)]))
            loss = nt_xent(*z.chunk(2))
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter += loss.detach() / per_epoch
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch}  nt-xent {meter.item() / world:.4f}", flush=True)

    if rank == 0:
        encoder = model.module.eval()
        with torch.no_grad():
            feats = encoder(images)[0].numpy()
        probe = LogisticRegression(max_iter=500).fit(feats[train_ids], labels[train_ids])
        print("linear probe accuracy", probe.score(feats[test_ids], labels[test_ids]))
        os.makedirs("out/p04", exist_ok=True)
        torch.save(encoder.state_dict(), "out/p04/encoder.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
