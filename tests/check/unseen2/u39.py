"""Preemptible-queue training: the job runs in slices, each slice continues from the last snapshot."""
import argparse
import logging
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("slices")


def tiles(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 6, 6, generator=g)
    band = (x[:, 0].mean((1, 2)) > x[:, 1].mean((1, 2))).long()
    edge = (x[:, 2, :, :3].mean((1, 2)) > x[:, 2, :, 3:].mean((1, 2))).long()
    return TensorDataset(x, band * 2 + edge)


class TileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.GroupNorm(3, 12)
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(12 * 36, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x))))


class Snapshot:
    def __init__(self, path):
        self.path = path
        self.main = dist.get_rank() == 0

    def write(self, epoch, model, opt, sched):
        if self.main:
            torch.save({"epoch": epoch, "model": model.module.state_dict(), "opt": opt.state_dict(),
                        "sched": sched.state_dict()}, self.path + ".tmp")
            os.replace(self.path + ".tmp", self.path)
        dist.barrier()

    def restore(self, model, opt, sched):
        """Returns the epoch to continue with."""
        info = [0, None, None]
        if self.main and os.path.exists(self.path):
            snap = torch.load(self.path, map_location="cpu")
            model.module.load_state_dict(snap["model"])
            info = [snap["epoch"] + 1, snap["opt"], snap["sched"]]
        dist.broadcast_object_list(info, src=0)
        if info[1] is not None:
            opt.load_state_dict(info[1])
            sched.load_state_dict(info[2])
        return info[0]

    def clear(self):
        if self.main and os.path.exists(self.path):
            os.remove(self.path)
        dist.barrier()


def accuracy(net, data, rank, world):
    net.eval()
    x, y = (t[rank::world] for t in data.tensors)
    with torch.no_grad():
        s = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(s)
    net.train()
    return (s[0] / s[1]).item()


def run_slice(args, number, train, val):
    """One allocation of the queue; builds everything from scratch like a new process would."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + number)
    model = DDP(TileNet())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    snap = Snapshot(args.snapshot)
    start = snap.restore(model, opt, sched)
    stop = min(args.epochs, start + args.epochs_per_slice)
    log.info("slice %d: epochs %d..%d", number, start, stop - 1)

    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train, args.batch, sampler=sampler)
    for epoch in range(start, stop):
        sampler.set_epoch(epoch)
        s = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            s += torch.tensor([loss.item() * len(y), len(y)])
        sched.step()
        dist.all_reduce(s)
        log.info("epoch %d loss %.4f acc %.3f", epoch, s[0] / s[1], accuracy(model.module, val, rank, world))
        snap.write(epoch, model, opt, sched)
    return stop


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--epochs-per-slice", type=int, default=2)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--seed", type=int, default=50)
    ap.add_argument("--snapshot", default=os.path.join(tempfile.gettempdir(), "tiles_snapshot.pt"))
    ap.add_argument("--keep", action="store_true", help="continue an earlier run")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.ERROR, format="%(message)s")
    if not args.keep:
        Snapshot(args.snapshot).clear()
    train, val = tiles(640, 1), tiles(160, 2)
    done, number = 0, 0
    while done < args.epochs:
        done = run_slice(args, number, train, val)
        number += 1
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
