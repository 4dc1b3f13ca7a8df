"""Digits, micro-batches with accumulated gradients, exponential moving average of the weights."""
import contextlib
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS, MICRO, ACCUM, LR, SEED = 3, 16, 3, 4e-3, 5


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.GroupNorm(6, 24), nn.ReLU(),
            nn.Conv2d(24, 24, 3, stride=2, padding=1), nn.GroupNorm(6, 24), nn.ReLU(),
        )
        self.head = nn.Linear(24 * 16, 10)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def load():
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(d.target)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    tr, te = perm[:1440], perm[1440:]
    return x[tr], y[tr], x[te], y[te]


def augment(x, gen):
    dx, dy = torch.randint(-1, 2, (2,), generator=gen).tolist()
    return torch.roll(x, (dx, dy), dims=(2, 3)) + 0.05 * torch.randn(x.shape, generator=gen)


@torch.no_grad()
def update_ema(ema, net, decay):
    for e, p in zip(ema.parameters(), net.parameters()):
        e.lerp_(p, 1 - decay)


@torch.no_grad()
def accuracy(net, x, y):
    net.eval()
    acc = (net(x).argmax(1) == y).float().mean().item()
    net.train()
    return acc


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    xt, yt, xv, yv = load()
    net = SmallNet()
    ddp = DDP(net)
    ema = copy.deepcopy(net).requires_grad_(False)
    opt = torch.optim.SGD(ddp.parameters(), lr=10 * LR, momentum=0.9, nesterov=True)
    aug_gen = torch.Generator().manual_seed(SEED + 31 * rank)

    per_rank = len(xt) // world
    n_micro = per_rank // MICRO
    n_updates = -(-n_micro // ACCUM)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=10 * LR, total_steps=EPOCHS * n_updates)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(xt), generator=torch.Generator().manual_seed(SEED + epoch))
        order = order[: per_rank * world].view(per_rank, world)[:, rank]
        log = torch.zeros(2)
        for i in range(n_micro):
            first = i - i % ACCUM
            window = min(ACCUM, n_micro - first)
            last = i == first + window - 1
            idx = order[i * MICRO:(i + 1) * MICRO]
            x, y = augment(xt[idx], aug_gen), yt[idx]
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = F.cross_entropy(ddp(x), y)
                (loss / window).backward()
            log += torch.tensor([loss.item(), 1.0])
            if last:
                opt.step()
                opt.zero_grad()
                sched.step()
                update_ema(ema, net, 0.9)
        dist.all_reduce(log)
        if rank == 0:
            print(f"epoch {epoch} loss {log[0] / log[1]:.4f} acc {accuracy(net, xv, yv):.4f} "
                  f"ema {accuracy(ema, xv, yv):.4f}", flush=True)

    if rank == 0:
        os.makedirs("./out/c07", exist_ok=True)
        torch.save({"net": net.state_dict(), "ema": ema.state_dict()}, "./out/c07/final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
