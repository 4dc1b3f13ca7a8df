"""RBF network with BatchNorm on digits. The main process fits the centres,
validates and decides; the others follow."""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class RBFNet(nn.Module):
    def __init__(self, centres, gamma, hidden=96):
        super().__init__()
        self.register_buffer("centres", centres)
        self.log_gamma = nn.Parameter(torch.full((len(centres),), float(gamma)).log())
        self.mlp = nn.Sequential(
            nn.Linear(len(centres), hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10)
        )

    def forward(self, x):
        d = torch.cdist(x, self.centres).pow(2)
        return self.mlp(torch.exp(-self.log_gamma.exp() * d))


def fit_centres(x, k):
    """k-means depends on BLAS and thread count, so it is run in one place only."""
    centres, gamma = torch.zeros(k, x.shape[1]), torch.zeros(1)
    if dist.get_rank() == 0:
        km = KMeans(k, n_init=1, max_iter=30, random_state=None).fit(x.numpy())
        centres.copy_(torch.from_numpy(km.cluster_centers_))
        gamma.fill_(1.0 / torch.pdist(centres).pow(2).mean())
    dist.broadcast(centres, src=0)
    dist.broadcast(gamma, src=0)
    return centres, gamma.item()


def run_name():
    name = [time.strftime("run-%Y%m%d-%H%M%S") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, src=0)
    return name[0]


class Judge:
    """Validation, best checkpoint and patience; one verdict for all processes."""

    def __init__(self, net, x, y, path, patience):
        self.net, self.x, self.y, self.path, self.patience = net, x, y, path, patience
        self.best, self.bad = float("inf"), 0

    @torch.no_grad()
    def __call__(self):
        verdict = torch.zeros(2)
        if dist.get_rank() == 0:
            self.net.eval()
            nll = F.cross_entropy(self.net(self.x), self.y).item()
            self.net.train()
            if nll < self.best - 1e-3:
                self.best, self.bad = nll, 0
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                torch.save(self.net.state_dict(), self.path)
            else:
                self.bad += 1
            verdict = torch.tensor([nll, float(self.bad > self.patience)])
        dist.broadcast(verdict, src=0)
        return verdict[0].item(), bool(verdict[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--centres", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--patience", type=int, default=3)
    ap.add_argument("--seed", type=int, default=19)
    ap.add_argument("--out", default="./out/a19")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    tr, va, te = perm[:1280], perm[1280:1540], perm[1540:]
    dataset = TensorDataset(x[tr], y[tr])
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)

    centres, gamma = fit_centres(x[tr], args.centres)
    torch.manual_seed(args.seed + rank)
    net = RBFNet(centres, gamma)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)
    path = os.path.join(args.out, run_name(), "best.pt")
    judge = Judge(net, x[va], y[va], path, args.patience)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (xb, yb) in enumerate(loader):
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if rank == 0 and step % 10 == 0:
                print(f"epoch {epoch} step {step} rank-0 loss {loss.item():.4f}", flush=True)
        nll, stop = judge()
        sched.step(nll)
        if rank == 0:
            print(f"epoch {epoch} val nll {nll:.4f} lr {opt.param_groups[0]['lr']:.1e}", flush=True)
        if stop:
            break

    net.load_state_dict(torch.load(path, map_location="cpu"))
    net.eval()
    mine = te[rank::world]
    with torch.no_grad():
        score = torch.tensor([(net(x[mine]).argmax(1) == y[mine]).sum().item(), len(mine)], dtype=torch.float64)
    dist.reduce(score, dst=0)
    if rank == 0:
        print(f"test accuracy of {path}: {(score[0] / score[1]).item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
