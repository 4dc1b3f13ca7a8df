"""Small trainings, right and wrong, by name: `gradient_steps.py NAME…`. Each prints a hash of its weights."""

import hashlib
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

STEPS = 5


class Net(nn.Module):
    def __init__(self, outputs=4, recompute=False):
        super().__init__()
        self.body, self.head, self.recompute = nn.Linear(8, 16), nn.Linear(16, outputs), recompute

    def forward(self, x):
        h = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return self.head(torch.relu(h))


def batch():
    """Return a batch that no other rank has; initial weights are the same on all of them."""
    return torch.randn(16, 8) + dist.get_rank(), torch.randint(0, 4, (16,))


def gathered(z):
    parts = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z)
    return torch.cat(parts)


def gan():
    g, d = DDP(Net(8)), DDP(Net(1))
    g_optimizer, d_optimizer = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
    for _ in range(STEPS):
        fake = g(batch()[0])
        d_optimizer.zero_grad()
        F.softplus(torch.cat([d(fake.detach()), -d(batch()[0])])).mean().mul(0.5).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        F.softplus(-d(fake)).mean().backward()
        g_optimizer.step()
    return g


def accumulated():
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4 * STEPS):
        x, y = batch()
        with nullcontext() if i % 4 == 3 else model.no_sync():
            (F.cross_entropy(model(x), y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            for p in model.parameters():
                p.grad = None
    return model


def oddities():
    model = DDP(Net(recompute=True))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for _ in range(STEPS):
        x, y = batch()
        logits = model(x)
        gathered(logits)  # for a metric, although it has a gradient
        optimizer.zero_grad()
        losses = F.cross_entropy(logits, y, reduction="none")
        loss = losses.mean()
        dist.all_reduce(losses)  # for the log, after its last use
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.module(x)
    return model


def local_sgd():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if i % 3 == 2:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()
    return model


def weighted():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward(torch.tensor(1 / dist.get_world_size()))
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    return model


def closures():
    model = DDP(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = batch()

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return model


def scaled(unscale=True):
    model = DDP(Net())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clipping
        scaler.step(optimizer)
        scaler.update()
    return model


def sharded(last=True):
    model = Net()
    fully_shard(model.body)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(2 * STEPS):
        model.set_requires_gradient_sync((i % 2 == 1) is last)
        x, y = batch()
        (F.cross_entropy(model(x), y) / 2).backward()  # no-sync-misplaced
        if i % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.01)
            optimizer.step()
            optimizer.zero_grad()


def flat(own_clipping=False):
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if own_clipping:
            model.clip_grad_norm_(0.01)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # clipping by shards
        optimizer.step()


def compiled():
    model = torch.compile(DDP(Net()), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def bypassed():
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model.module(x), y).backward()  # forward-bypasses-ddp
        optimizer.step()


def carried():
    model = DDP(Net(), find_unused_parameters=True)  # ddp-options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2 * STEPS):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()  # zero-grad
        optimizer.step()


def unfrozen():
    net = Net()
    net.body.requires_grad_(False)
    model = DDP(net)
    net.body.requires_grad_(True)  # parameters-changed-after-wrapping
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def contrasted():
    model = DDP(Net())
    optimizer = torch.optim.SGD([*model.parameters(), scale := nn.Parameter(torch.ones(4))], lr=0.1)  # gradients-differ
    for _ in range(STEPS):
        z = F.normalize(model(batch()[0]), dim=1)
        keys = gathered(z)
        optimizer.zero_grad()
        F.cross_entropy(z * scale @ keys.T, torch.arange(16) + 16 * dist.get_rank()).backward()
        optimizer.step()


def correlated():
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        z = F.normalize(model(batch()[0]), dim=0)
        c = z.T @ z / dist.get_world_size()
        dist.all_reduce(c)  # gather-cuts-gradient
        optimizer.zero_grad()
        (c - torch.eye(4)).square().mean().backward()
        optimizer.step()


def summed():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(2 * STEPS):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()  # accumulation-scale
        if i % 2 == 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)  # loss-summed
        optimizer.step()


def stale():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # optimizer-before-wrapping
    fully_shard(model)
    for _ in range(STEPS):
        x, y = batch()
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


WAYS = {
    "scaled wrong": lambda: scaled(unscale=False),
    "sharded wrong": lambda: sharded(last=False),
    "flat": lambda: flat(own_clipping=True),
    "flat wrong": flat,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for way in sys.argv[1:]:
        torch.manual_seed(0)
        model = (WAYS.get(way) or globals()[way])()
        if model is not None:
            weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            print("weights", way, hashlib.sha256(weights).hexdigest())
    dist.destroy_process_group()
