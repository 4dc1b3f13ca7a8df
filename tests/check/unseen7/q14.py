"""Implicit-feedback recommender (BPR) fed from an interaction stream; gradients are averaged by hand."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, IterableDataset

USERS, ITEMS, DIM = 301, 200, 24
BATCH, MAX_EPOCHS, PATIENCE = 64, 4, 2


def interactions():
    g = torch.Generator().manual_seed(0)
    u, i = torch.randn(USERS, 6, generator=g), torch.randn(ITEMS, 6, generator=g)
    chosen = (u @ i.t() + 1.5 * torch.randn(USERS, ITEMS, generator=g)).topk(13, dim=1).indices
    chosen = chosen.gather(1, torch.rand(USERS, 13, generator=g).argsort(1))
    held_out = chosen[:, 0]
    pairs = torch.stack([torch.arange(USERS).repeat_interleave(12), chosen[:, 1:].reshape(-1)], 1)
    return pairs, held_out


class Stream(IterableDataset):
    """All processes draw the same permutation and take every world-th pair of it."""

    def __init__(self, pairs, rank, world):
        self.pairs, self.rank, self.world = pairs, rank, world
        self.epoch = 0
        self.known = torch.zeros(USERS, ITEMS, dtype=torch.bool)
        self.known[pairs[:, 0], pairs[:, 1]] = True

    def __iter__(self):
        perm = torch.randperm(len(self.pairs), generator=torch.Generator().manual_seed(40 + self.epoch))
        perm = perm[: len(perm) // (BATCH * self.world) * BATCH * self.world]
        negs = torch.Generator().manual_seed(7000 + 100 * self.epoch + self.rank)
        for k in perm[self.rank :: self.world].tolist():
            user, pos = self.pairs[k].tolist()
            neg = int(torch.randint(ITEMS, (), generator=negs))
            while self.known[user, neg]:
                neg = int(torch.randint(ITEMS, (), generator=negs))
            yield user, pos, neg


class MF(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        self.bias = nn.Embedding(ITEMS, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def score(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)

    def forward(self, u, i, j):
        reg = self.user(u).pow(2).sum(1) + self.item(i).pow(2).sum(1) + self.item(j).pow(2).sum(1)
        return -F.logsigmoid(self.score(u, i) - self.score(u, j)).mean() + 1e-3 * reg.mean()


def average_gradients(params, world):
    grads = [p.grad for p in params]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat.div_(world)
    for g, s in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(s)


@torch.no_grad()
def hit_rate(model, known, held_out, rank, world, k=10):
    users = torch.arange(rank, USERS, world)
    s = model.user.weight[users] @ model.item.weight.t() + model.bias.weight.t()
    s = s.masked_fill(known[users], float("-inf"))
    hit = (s.topk(k, 1).indices == held_out[users, None]).any(1)
    counts = torch.tensor([hit.sum(), len(users)], dtype=torch.float64)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    pairs, held_out = interactions()
    stream = Stream(pairs, rank, world)
    loader = DataLoader(stream, batch_size=BATCH)

    model = MF()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    params = list(model.parameters())
    opt = torch.optim.Adam(params, lr=0.02)

    best, stale = 0.0, 0
    for epoch in range(MAX_EPOCHS):
        stream.epoch = epoch
        total = torch.zeros(2)
        for u, i, j in loader:
            loss = model(u, i, j)
            opt.zero_grad()
            loss.backward()
            average_gradients(params, world)
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        hr = hit_rate(model, stream.known, held_out, rank, world)
        stop = torch.zeros(1)
        if rank == 0:
            print(f"epoch {epoch}: bpr {total[0] / total[1]:.4f} hit@10 {hr:.4f}", flush=True)
            stale = 0 if hr > best else stale + 1
            if hr > best:
                best = hr
                os.makedirs("out/q14", exist_ok=True)
                torch.save({"model": model.state_dict(), "hit10": hr}, "out/q14/best.pt")
            stop.fill_(float(stale >= PATIENCE))
        dist.broadcast(stop, src=0)
        if stop.item():
            break

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
