"""DDP training from shard files read by worker processes."""
import argparse
import glob
import os
import random
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, get_worker_info


def rank_and_world():
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sample(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(20, generator=torch.Generator().manual_seed(7))
    x = torch.randn(n, 20, generator=g)
    y = (x @ w + 0.5 * (x[:, 0] * x[:, 1]) + 0.3 * torch.randn(n, generator=g) > 0).float()
    return x, y


def write_shards(folder, count, rows):
    for i in range(count):
        x, y = sample(rows, seed=1000 + i)
        torch.save({"x": x, "y": y}, os.path.join(folder, f"shard-{i:04d}.pt"))


class ShardReader(IterableDataset):
    """Reads every shard once per epoch, shard order reshuffled from the seed."""

    def __init__(self, folder, seed):
        self.files = sorted(glob.glob(os.path.join(folder, "shard-*.pt")))
        self.seed = seed
        self.epoch = -1

    def __iter__(self):
        self.epoch += 1
        files = list(self.files)
        random.Random(self.seed + self.epoch).shuffle(files)
        rank, world = rank_and_world()
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for path in files[rank * workers + worker::world * workers]:
            blob = torch.load(path, weights_only=True)
            order = list(range(len(blob["y"])))
            random.Random(f"{self.seed}-{self.epoch}-{path}").shuffle(order)
            for j in order:
                yield blob["x"][j], blob["y"][j]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x).squeeze(-1)


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    stats = torch.zeros(3, dtype=torch.float64, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        z = model.module(x)
        stats[0] += F.binary_cross_entropy_with_logits(z, y, reduction="sum")
        stats[1] += ((z > 0) == (y > 0.5)).sum()
        stats[2] += len(y)
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--workers", type=int, default=1)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{local_rank}" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = rank_and_world()
    torch.manual_seed(args.seed)

    holder = [None]
    if rank == 0:
        holder[0] = args.out or tempfile.mkdtemp(prefix="shards_")
        os.makedirs(os.path.join(holder[0], "data"), exist_ok=True)
        write_shards(os.path.join(holder[0], "data"), count=16, rows=64)
    dist.broadcast_object_list(holder, src=0)
    out = holder[0]

    # CUDA cannot be used in forked workers
    loader = DataLoader(ShardReader(os.path.join(out, "data"), args.seed), batch_size=args.batch_size,
                        num_workers=args.workers, multiprocessing_context="spawn",
                        persistent_workers=True, pin_memory=gpu)
    val = TensorDataset(*sample(400, seed=5))
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=128)

    model = DistributedDataParallel(Net().to(device), device_ids=[local_rank] if gpu else None)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)
    for epoch in range(args.epochs):
        meter = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter[0] += loss.detach() * len(y)
            meter[1] += len(y)
        sched.step()
        dist.all_reduce(meter)
        val_loss, acc = validate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} train {meter[0] / meter[1]:.4f} val {val_loss:.4f} acc {acc:.4f}", flush=True)
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(),
                        "sched": sched.state_dict(), "epoch": epoch}, os.path.join(out, "last.pt"))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(os.path.join(out, "data"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
