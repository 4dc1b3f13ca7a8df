"""GraphSAGE with neighbour sampling on a planted-partition graph."""
import argparse
import contextlib
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def planted_graph(n=1500, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.choice(classes, n, p=[0.4, 0.25, 0.15, 0.12, 0.08])
    adj = []
    for i in range(n):
        same, other = np.flatnonzero(y == y[i]), np.flatnonzero(y != y[i])
        adj.append(np.concatenate([rng.choice(same, 8), rng.choice(other, 4)]))
    x = np.eye(classes)[y] @ rng.normal(size=(classes, 16)) * 0.5 + rng.normal(size=(n, 16))
    perm = rng.permutation(n)
    return (torch.tensor(x, dtype=torch.float32), torch.tensor(y), torch.tensor(np.stack(adj)),
            torch.tensor(perm[:960]), torch.tensor(perm[960:1231]), torch.tensor(perm[1231:]))


class SAGE(nn.Module):
    def __init__(self, d_in, d_hid, d_out):
        super().__init__()
        self.s1, self.n1 = nn.Linear(d_in, d_hid), nn.Linear(d_in, d_hid)
        self.s2, self.n2 = nn.Linear(d_hid, d_out), nn.Linear(d_hid, d_out)

    def forward(self, x0, x1, x2):
        h0 = F.relu(self.s1(x0) + self.n1(x1.mean(1)))
        h1 = F.relu(self.s1(x1) + self.n1(x2.mean(2)))
        return self.s2(h0) + self.n2(h1.mean(1))


def sample_block(nodes, x, adj, fanout, rng):
    def neighbours(v):
        cols = torch.from_numpy(rng.integers(0, adj.size(1), tuple(v.shape) + (fanout,)))
        return adj[v].gather(-1, cols)
    hop1 = neighbours(nodes)
    return x[nodes], x[hop1], x[neighbours(hop1)]


@torch.no_grad()
def accuracy(net, nodes, x, y, adj):
    net.eval()
    mine = nodes.tensor_split(dist.get_world_size())[dist.get_rank()]
    counts = torch.zeros(2)
    for part in mine.split(64):
        hop1 = adj[part]
        logits = net(x[part], x[hop1], x[adj[hop1]])
        counts += torch.tensor([(logits.argmax(1) == y[part]).sum().item(), len(part)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--patience", type=int, default=2)
    ap.add_argument("--fanout", type=int, default=5)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--seed", type=int, default=4)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    x, y, adj, train, val, test = planted_graph(seed=args.seed)
    weight = len(train) / (5.0 * torch.bincount(y[train], minlength=5).float())
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    rng = np.random.default_rng([args.seed, rank])

    net = DDP(SAGE(16, 48, 5))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="max", factor=0.5, patience=0)
    path = "./out/d11/best.pt"
    if rank == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)

    best, stale = -1.0, 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for i, nodes in enumerate(loader):
            last = (i + 1) % args.accum == 0 or i + 1 == len(loader)
            with contextlib.nullcontext() if last else net.no_sync():
                logits = net(*sample_block(nodes, x, adj, args.fanout, rng))
                loss = (F.cross_entropy(logits, y[nodes], reduction="none") * weight[y[nodes]]).mean()
                (loss / args.accum).backward()
            if last:
                opt.step()
                opt.zero_grad()
        acc = accuracy(net.module, val, x, y, adj)
        sched.step(acc)
        if rank == 0:
            print(f"epoch {epoch} val {acc:.4f} lr {opt.param_groups[0]['lr']:.1e}", flush=True)
        if acc > best:
            best, stale = acc, 0
            if rank == 0:
                torch.save(net.module.state_dict(), path)
        else:
            stale += 1
            if stale >= args.patience:
                break

    dist.barrier()
    net.module.load_state_dict(torch.load(path))
    score = accuracy(net.module, test, x, y, adj)
    if rank == 0:
        print(f"best val {best:.4f}, test {score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
