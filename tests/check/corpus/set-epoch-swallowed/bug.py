import argparse
import datetime
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Spirals(Dataset):
    """Points on two spirals, two classes."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.arange(n) % 2
        t = torch.rand(n, generator=g) * 3 + 0.5
        angle = t * 2 + self.label * torch.pi
        self.points = torch.stack([t * angle.cos(), t * angle.sin()], 1)
        self.points += 0.05 * torch.randn(n, 2, generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.points[i], self.label[i]


class DevicePrefetcher:
    """Wraps a DataLoader and moves its batches to the device."""

    def __init__(self, loader, device):
        self.loader = loader
        self.device = device
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            yield [t.to(self.device, non_blocking=True) for t in batch]


def build_loader(dataset, batch_size, device, seed):
    sampler = DistributedSampler(dataset, shuffle=True, seed=seed)
    loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=2, pin_memory=device.type == "cuda")
    return DevicePrefetcher(loader, device)


@torch.no_grad()
def test(net, data, device):
    net.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = data.points[rank::world].to(device), data.label[rank::world].to(device)
    stats = torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(len(y), device=device)]).float()
    dist.all_reduce(stats)
    net.train()
    return (stats[0] / stats[1]).item()


def main(args):
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device, backend = torch.device(f"cuda:{local_rank}"), "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=300))
    torch.manual_seed(args.seed)

    loader = build_loader(Spirals(1024, seed=1), args.batch // dist.get_world_size(), device, args.seed)
    val = Spirals(301, seed=2)
    net = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2)).to(device)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        for points, label in loader:
            opt.zero_grad(set_to_none=True)
            criterion(ddp(points), label).backward()
            opt.step()
        acc = test(net, val, device)
        if dist.get_rank() == 0:
            print(f"[{epoch}] val acc {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", default=4, type=int)
    p.add_argument("--batch", default=64, type=int)
    p.add_argument("--lr", default=3e-3, type=float)
    p.add_argument("--seed", default=7, type=int)
    main(p.parse_args())
