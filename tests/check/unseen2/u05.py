"""Per-site training: every process owns the records of its own hospital sites, sizes differ."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

SITE_SIZES = {"north": 90, "south": 70, "east": 130, "west": 50, "island": 34}


def site_data(name, n):
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    w = torch.linspace(-1, 1, 12)
    x = torch.randn(n, 12, generator=g) + 0.2 * torch.randn(1, 12, generator=g)
    p = torch.sigmoid(2 * (x @ w))
    return TensorDataset(x, torch.bernoulli(p, generator=g))


def assign_sites(rank, world):
    """Greedy balance by size, identical on every process."""
    load = [0] * world
    mine = []
    for name, n in sorted(SITE_SIZES.items(), key=lambda kv: (-kv[1], kv[0])):
        r = load.index(min(load))
        load[r] += n
        if r == rank:
            mine.append(name)
    return mine


def build_model():
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))


def run_epoch(model, loader, opt, loss_fn):
    seen, total = 0, 0.0
    model.train()
    with Join([model]):
        for x, y in loader:
            opt.zero_grad()
            loss = loss_fn(model(x).squeeze(1), y)
            loss.backward()
            opt.step()
            seen += len(y)
            total += loss.item() * len(y)
    return total, seen


@torch.no_grad()
def site_report(net, sites):
    net.eval()
    rows = []
    for s in sites:
        x, y = site_data(s, SITE_SIZES[s]).tensors
        acc = ((net(x).squeeze(1) > 0).float() == y).float().mean().item()
        rows.append((s, len(y), acc))
    return rows


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bs", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31 + rank)

    sites = assign_sites(rank, world)
    local = ConcatDataset([site_data(s, SITE_SIZES[s]) for s in sites])
    loader = DataLoader(local, batch_size=args.bs, shuffle=True)
    model = DDP(build_model())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    print(f"rank {rank}: sites {sites}, {len(local)} records, {len(loader)} batches", flush=True)

    for epoch in range(args.epochs):
        total, seen = run_epoch(model, loader, opt, nn.BCEWithLogitsLoss())
        sched.step()
        # Ranks that ran out of data early hold stale momentum; take the longest-running rank's.
        agree_on_state(model, opt, len(loader))
        stats = torch.tensor([total, float(seen)], dtype=torch.float64)
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} train_loss {stats[0] / stats[1]:.4f} over {int(stats[1])} records", flush=True)

    gathered = [None] * world
    dist.all_gather_object(gathered, site_report(model.module, sites))
    if rank == 0:
        rows = [r for part in gathered for r in part]
        for s, n, acc in sorted(rows):
            print(f"{s:8s} n={n:4d} acc={acc:.3f}")
        print("pooled acc", sum(n * a for _, n, a in rows) / sum(n for _, n, _ in rows))
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


def agree_on_state(model, opt, n_batches):
    counts = [torch.zeros((), dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(n_batches))
    src = int(torch.stack(counts).argmax())
    for p in model.module.parameters():
        dist.broadcast(p.data, src)
        buf = opt.state[p].get("momentum_buffer")
        if buf is not None:
            dist.broadcast(buf, src)


if __name__ == "__main__":
    main()
