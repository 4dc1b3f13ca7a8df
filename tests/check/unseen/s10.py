"""Data parallelism by hand: broadcast once, average gradients at each step."""
import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def sync_params(module):
    for t in list(module.parameters()) + list(module.buffers()):
        dist.broadcast(t.data, src=0)


def average_grads(module):
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    for g, avg in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(avg)


def shard_indices(n, epoch, seed, rank, world):
    g = torch.Generator()
    g.manual_seed(seed * 10007 + epoch)
    perm = torch.randperm(n, generator=g)
    per = n // world
    return perm[rank * per:(rank + 1) * per]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")

    X, y = load_diabetes(return_X_y=True)
    X, y = torch.tensor(X).float() * 20, torch.tensor(y).float()
    perm = torch.randperm(len(X), generator=torch.Generator().manual_seed(args.seed))
    tr, te = perm[:352], perm[352:]
    mu, sd = y[tr].mean(), y[tr].std()
    Xtr, ytr = X[tr].to(device), ((y[tr] - mu) / sd).to(device)
    Xte, yte = X[te].to(device), ((y[te] - mu) / sd).to(device)

    torch.manual_seed(args.seed + rank)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)).to(device)
    sync_params(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)

    for epoch in range(args.epochs):
        model.train()
        idx = shard_indices(len(Xtr), epoch, args.seed, rank, world)
        for b in idx.split(args.batch_size):
            b = b.to(device)
            loss = nn.functional.mse_loss(model(Xtr[b]).squeeze(1), ytr[b])
            opt.zero_grad()
            loss.backward()
            average_grads(model)
            opt.step()

        model.eval()
        with torch.no_grad():
            err = (model(Xte[rank::world]).squeeze(1) - yte[rank::world]).pow(2)
        agg = torch.stack([err.sum(), torch.tensor(float(err.numel()), device=device)])
        dist.all_reduce(agg)
        if rank == 0:
            print("epoch %d  test mse (standardised) %.4f" % (epoch, agg[0] / agg[1]))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
