import os
import random
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class LogStream(IterableDataset):
    """Streams (sensor window, next value) pairs out of shard files; here the shards are generated."""

    def __init__(self, shards, per_shard=80, window=16):
        self.shards = list(shards)
        self.per_shard = per_shard
        self.window = window
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def read_shard(self, shard):
        g = torch.Generator().manual_seed(shard)
        for _ in range(self.per_shard):
            phase = torch.rand(1, generator=g) * 6.28
            freq = 0.2 + 0.6 * torch.rand(1, generator=g)
            t = torch.arange(self.window + 1)
            s = torch.sin(freq * t + phase) + 0.05 * torch.randn(self.window + 1, generator=g)
            yield s[:-1], s[-1:]

    def __iter__(self):
        shards = list(self.shards)
        random.Random(self.epoch).shuffle(shards)
        info = get_worker_info()
        if info is not None:
            shards = shards[info.id::info.num_workers]
        for shard in shards:
            yield from self.read_shard(shard)


class Forecaster(nn.Module):
    def __init__(self, window=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(window, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


def validate(model, device, rank, world):
    model.eval()
    held_out = LogStream([1000, 1001])
    rows = [r for shard in held_out.shards for r in held_out.read_shard(shard)]
    x = torch.stack([r[0] for r in rows])[rank::world].to(device)
    y = torch.stack([r[1] for r in rows])[rank::world].to(device)
    with torch.no_grad():
        out = torch.stack([(model(x) - y).abs().sum(), torch.tensor(float(len(y)), device=device)])
    dist.all_reduce(out)
    return (out[0] / out[1]).item()


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    stream = LogStream(range(16))
    loader = DataLoader(stream, batch_size=32, num_workers=1)

    torch.manual_seed(0)
    net = Forecaster().to(device)
    model = DDP(net, device_ids=[local] if cuda else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(2):
        stream.set_epoch(epoch)
        model.train()
        total = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.l1_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach(), torch.ones((), device=device)])
        dist.all_reduce(total)
        mae = validate(net, device, rank, world)
        if rank == 0:
            print(f"epoch {epoch} train mae {total[0] / total[1]:.4f} val mae {mae:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
