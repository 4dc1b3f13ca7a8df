"""Transfer learning: head first, then the upper backbone blocks."""
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

LOG = logging.getLogger("finetune")


class Backbone(nn.Module):
    def __init__(self, dim=32, depth=3):
        super().__init__()
        self.stem = nn.Linear(16, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(depth))

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = x + b(x)
        return x


class Classifier(nn.Module):
    def __init__(self, backbone, classes=5):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


class FreezeSchedule:
    """epoch -> number of backbone blocks (from the top) that train."""

    def __init__(self, spec):
        self.spec = dict((int(a), int(b)) for a, b in (kv.split(":") for kv in spec.split(",")))

    def start(self, net):
        for p in net.backbone.parameters():
            p.requires_grad = False

    def on_epoch(self, net, epoch):
        if epoch not in self.spec:
            return 0
        n = self.spec[epoch]
        for block in list(net.backbone.blocks)[-n:] if n else []:
            for p in block.parameters():
                p.requires_grad = True
        return n


def toy(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(5, 16, generator=torch.Generator().manual_seed(99))
    y = torch.randint(0, 5, (n,), generator=g)
    return TensorDataset(proto[y] + 0.9 * torch.randn(n, 16, generator=g), y)


def evaluate(net, data, rank, world):
    net.eval()
    x, y = (t[rank::world] for t in data.tensors)
    with torch.no_grad():
        s = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(s)
    net.train()
    return (s[0] / s[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--bs", type=int, default=16)
    p.add_argument("--head-lr", type=float, default=1e-2)
    p.add_argument("--backbone-lr", type=float, default=2e-3)
    p.add_argument("--unfreeze", default="1:1,2:2")
    p.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "finetuned.pt"))
    a = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(name)s | %(message)s")

    torch.manual_seed(55)
    net = Classifier(Backbone())
    schedule = FreezeSchedule(a.unfreeze)
    schedule.start(net)
    model = DDP(net)
    optimizer = torch.optim.AdamW([
        {"params": net.head.parameters(), "lr": a.head_lr},
        {"params": net.backbone.parameters(), "lr": a.backbone_lr},
    ], weight_decay=1e-2)

    train, val = toy(640, 1), toy(150, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True)
    loader = DataLoader(train, a.bs, sampler=sampler)
    crit = nn.CrossEntropyLoss()

    for epoch in range(a.epochs):
        opened = schedule.on_epoch(net, epoch)
        if opened:
            LOG.info("epoch %d: training the last %d block(s)", epoch, opened)
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = crit(model(x), y)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(total)
        LOG.info("epoch %d loss %.4f val acc %.3f", epoch, total[0] / total[1], evaluate(net, val, rank, world))

    if rank == 0:
        torch.save(net.state_dict(), a.out)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
