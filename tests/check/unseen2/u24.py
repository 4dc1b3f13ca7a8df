"""BatchNorm ConvNet on CPU ranks. Normalisation uses local batches; running statistics are merged
over the ranks before they are used for evaluation or written to disk."""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    u = torch.arange(10).float()
    fx = torch.tensor([0.6, 1.4, 2.2])[y].view(-1, 1, 1)
    ph = 6.28 * torch.rand(n, 1, 1, generator=g)
    img = torch.sin(fx * (u.view(1, 1, 10) + u.view(1, 10, 1)) + ph)
    return TensorDataset((img + 0.5 * torch.randn(n, 10, 10, generator=g)).unsqueeze(1), y)


def conv_bn(i, o, stride):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(conv_bn(1, 8, 1), conv_bn(8, 16, 2), conv_bn(16, 16, 2))
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.trunk(x).mean((2, 3)))


@torch.no_grad()
def merge_running_stats(net, world):
    """Law of total variance over the ranks; equal batch counts per rank."""
    for m in net.modules():
        if isinstance(m, _BatchNorm) and m.track_running_stats:
            mean, second = m.running_mean.clone(), m.running_var + m.running_mean ** 2
            packed = torch.stack([mean, second])
            dist.all_reduce(packed)
            packed /= world
            m.running_mean.copy_(packed[0])
            m.running_var.copy_(packed[1] - packed[0] ** 2)


def fit(model, loader, sampler, opt, epoch):
    sampler.set_epoch(epoch)
    model.train()
    tally = torch.zeros(2)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        tally[0] += loss.detach() * len(y)
        tally[1] += len(y)
    dist.all_reduce(tally)
    return (tally[0] / tally[1]).item()


@torch.no_grad()
def score(net, data, rank, world):
    net.eval()
    right = torch.zeros(2)
    for x, y in DataLoader(Subset(data, range(rank, len(data), world)), 50):
        right += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--epochs", type=int, default=3)
    cli.add_argument("--batch", type=int, default=24)
    cli.add_argument("--lr", type=float, default=0.05)
    cli.add_argument("--path", default=os.path.join(tempfile.gettempdir(), "textures_bn.pt"))
    opt_args = cli.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    net = Small()
    model = DistributedDataParallel(net, broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), opt_args.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, opt_args.epochs)
    train, val = textures(480, 1), textures(125, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, drop_last=True)
    loader = DataLoader(train, opt_args.batch, sampler=sampler, drop_last=True)

    best = 0.0
    for epoch in range(opt_args.epochs):
        loss = fit(model, loader, sampler, opt, epoch)
        sched.step()
        merge_running_stats(net, world)
        acc = score(net, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} acc {acc:.4f}", flush=True)
            if acc >= best:
                best = acc
                torch.save({"net": net.state_dict(), "acc": acc}, opt_args.path)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
