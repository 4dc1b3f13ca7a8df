import argparse
import logging
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

log = logging.getLogger("quantile")


def dist_sum(*values):
    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t)
    return t.tolist()


def any_rank(flag: bool) -> bool:
    t = torch.tensor(int(flag))
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t.item())


class EarlyStop:
    def __init__(self, patience, min_delta=1e-3):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad = float("inf"), 0

    def update(self, value):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
            return True
        self.bad += 1
        return False

    @property
    def exhausted(self):
        return self.bad > self.patience


class QuantileNet(nn.Module):
    qs = (0.1, 0.5, 0.9)

    def __init__(self, d=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 40), nn.ELU(), nn.Linear(40, 40), nn.ELU(), nn.Linear(40, len(self.qs)))

    def forward(self, x):
        return self.net(x)

    @classmethod
    def pinball(cls, pred, y):
        q = torch.tensor(cls.qs)
        e = y - pred
        return torch.maximum(q * e, (q - 1) * e).mean()


def data():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(800, 8, generator=g)
    y = x[:, :1] * 1.5 + (0.3 + x[:, 1:2].abs()) * torch.randn(800, 1, generator=g)
    return TensorDataset(x, y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-epochs", type=int, default=12)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--patience", type=int, default=2)
    ap.add_argument("--time-limit", type=float, default=60.0, help="seconds")
    ap.add_argument("--best-path", default=os.path.join(tempfile.gettempdir(), "quantile_best.pt"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(0)
    started = time.monotonic()

    full = data()
    train, val = Subset(full, range(0, 640)), Subset(full, range(640, 800))
    sampler = DistributedSampler(train, world, rank, shuffle=True)
    loader = DataLoader(train, args.batch, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 64)
    model = DDP(QuantileNet())
    opt = torch.optim.RMSprop(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=1)
    stop = EarlyStop(args.patience)

    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = QuantileNet.pinball(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()

        model.eval()
        s = n = 0.0
        with torch.no_grad():
            for x, y in val_loader:
                s += QuantileNet.pinball(model.module(x), y).item() * len(y)
                n += len(y)
        s, n = dist_sum(s, n)
        val_loss = s / n
        sched.step(val_loss)
        improved = stop.update(val_loss)
        if improved and rank == 0:
            torch.save(model.module.state_dict(), args.best_path)
        log.info("epoch %d pinball %.4f%s lr %.1e", epoch, val_loss, " *" if improved else "",
                 opt.param_groups[0]["lr"])
        if stop.exhausted:
            log.info("no improvement, stopping")
            break
        if any_rank(time.monotonic() - started > args.time_limit):
            log.info("time limit reached")
            break

    dist.barrier()
    model.module.load_state_dict(torch.load(args.best_path))
    inside = total = 0.0
    with torch.no_grad():
        for x, y in val_loader:
            p = model.module(x)
            inside += ((y >= p[:, :1]) & (y <= p[:, 2:])).sum().item()
            total += len(y)
    inside, total = dist_sum(inside, total)
    log.info("80%% interval coverage %.3f", inside / total)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
