"""Convolutional classifier with BatchNorm and an averaged copy for evaluation."""
import argparse
import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def patches(n, seed, classes=4):
    proto = torch.randn(classes, 1, 10, 10, generator=torch.Generator().manual_seed(60))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    gain = 0.5 + torch.rand(n, 1, 1, 1, generator=g)
    x = gain * proto[y] + 1.5 * torch.randn(n, 1, 10, 10, generator=g)
    return TensorDataset(x, y)


def build_model(classes=4):
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 25, classes),
    )


class WeightAverage:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, net):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for avg, cur in zip(self.net.parameters(), net.parameters()):
            avg.lerp_(cur, 1 - decay)

    @torch.no_grad()
    def copy_buffers(self, net):
        for avg, cur in zip(self.net.buffers(), net.buffers()):
            avg.copy_(cur)


@torch.no_grad()
def average_running_stats(net):
    for m in net.modules():
        if isinstance(m, _BatchNorm):
            for buf in (m.running_mean, m.running_var):
                dist.all_reduce(buf)
                buf.div_(dist.get_world_size())


@torch.no_grad()
def evaluate(net, data, device, batch_size=64):
    stat = torch.zeros(3, dtype=torch.float64, device=device)
    idx = torch.arange(dist.get_rank(), len(data), dist.get_world_size())
    for part in idx.split(batch_size):
        x, y = (t[part].to(device) for t in data.tensors)
        logits = net(x)
        stat += torch.stack([F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum(),
                             torch.tensor(len(y), device=device)]).double()
    dist.all_reduce(stat)
    return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--decay", type=float, default=0.95)
    p.add_argument("--seed", type=int, default=14)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    train, val = patches(1024, seed=1), patches(301, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    ddp = DDP(build_model().to(device), device_ids=[local] if cuda else None, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    average = WeightAverage(ddp.module, args.decay)

    best = 0.0
    out = args.out or (tempfile.mkdtemp(prefix="patches_") if rank == 0 else None)
    for epoch in range(args.epochs):
        ddp.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            average.update(ddp.module)
        average_running_stats(ddp.module)
        average.copy_buffers(ddp.module)
        val_loss, acc = evaluate(average.net, val, device)
        if rank == 0:
            print(f"epoch {epoch} val_loss {val_loss:.4f} val_acc {acc:.4f}", flush=True)
            if acc > best:
                best = acc
                os.makedirs(out, exist_ok=True)
                torch.save({"model": ddp.module.state_dict(), "average": average.net.state_dict(),
                            "epoch": epoch}, os.path.join(out, "best.pt"))
    if rank == 0:
        print(f"best accuracy {best:.4f}, saved in {out}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
