"""Streaming synthetic task: endless generators, fixed number of steps per epoch, EMA model."""
import argparse
import copy
import itertools
import logging
import os
import tempfile
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

logger = logging.getLogger("stream")


class Parity(IterableDataset):
    """Draws (bits, parity of the first k bits) forever."""

    def __init__(self, seed, rank, bits=16, k=3):
        self.seed, self.rank, self.bits, self.k = seed, rank, bits, k
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        worker = info.id if info is not None else 0
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, self.epoch, self.rank, worker]))
        while True:
            b = rng.integers(0, 2, self.bits)
            x = (2 * b - 1) + 0.1 * rng.standard_normal(self.bits)
            yield x.astype(np.float32), np.float32(b[: self.k].sum() % 2)


def fixed_set(n, bits=16, k=3):
    rng = np.random.default_rng(np.random.SeedSequence([987654321]))
    b = rng.integers(0, 2, (n, bits))
    x = (2 * b - 1) + 0.1 * rng.standard_normal((n, bits))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(b[:, :k].sum(1) % 2, dtype=torch.float32)


def build(bits=16, width=96):
    return nn.Sequential(nn.Linear(bits, width), nn.ReLU(), nn.LayerNorm(width),
                         nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


@torch.no_grad()
def update_ema(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.mul_(decay).add_(p, alpha=1 - decay)


@torch.no_grad()
def score(net, x, y):
    was = net.training
    net.eval()
    z = net(x).squeeze(1)
    net.train(was)
    return F.binary_cross_entropy_with_logits(z, y).item(), ((z > 0).float() == y).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--steps-per-epoch", type=int, default=60)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--workers", type=int, default=1)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--ema", type=float, default=0.97)
    ap.add_argument("--seed", type=int, default=4)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=20))
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")

    torch.manual_seed(args.seed)
    ddp = DistributedDataParallel(build().to(device), device_ids=[local_rank] if gpu else None)
    ema = copy.deepcopy(ddp.module).requires_grad_(False)
    opt = torch.optim.Adam(ddp.parameters(), lr=args.lr)
    total = args.epochs * args.steps_per_epoch
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=total)

    stream = Parity(args.seed, rank)
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=args.workers)
    out = None
    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="parity_")
        os.makedirs(out, exist_ok=True)
        val_x, val_y = (t.to(device) for t in fixed_set(1000))

    best = float("inf")
    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        sums = torch.zeros(2, device=device)
        for x, y in itertools.islice(loader, args.steps_per_epoch):
            x, y = x.to(device), y.to(device)
            loss = F.binary_cross_entropy_with_logits(ddp(x).squeeze(1), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            opt.step()
            sched.step()
            update_ema(ema, ddp.module, args.ema)
            sums += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(sums)

        result = torch.zeros(2, device=device)
        if rank == 0:
            result = torch.tensor(score(ema, val_x, val_y), device=device)
        dist.broadcast(result, src=0)
        val_loss, acc = result.tolist()
        logger.info("epoch %d train %.4f ema val %.4f acc %.4f", epoch,
                    (sums[0] / sums[1]).item(), val_loss, acc)
        if val_loss < best:
            best = val_loss
            if rank == 0:
                torch.save({"model": ddp.module.state_dict(), "ema": ema.state_dict(),
                            "opt": opt.state_dict(), "sched": sched.state_dict(), "epoch": epoch,
                            "best": best}, os.path.join(out, "best.pt"))
        if acc == 1.0 and val_loss < 1e-3:
            logger.info("solved")
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
