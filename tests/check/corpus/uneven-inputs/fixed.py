"""Each process trains on the shards of its own data provider; their sizes differ."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class ShardReader(IterableDataset):
    """Yields the records of shard files number rank, rank + world_size, ..."""

    def __init__(self, num_shards, rank, world_size, seed):
        self.shards = range(rank, num_shards, world_size)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.Generator().manual_seed(self.seed + self.epoch)
        shards = [self.shards[i] for i in torch.randperm(len(self.shards), generator=order)]
        info = torch.utils.data.get_worker_info()
        if info is not None:
            shards = shards[info.id :: info.num_workers]
        for shard in shards:
            g = torch.Generator().manual_seed(1000 + shard)
            size = 60 + int(torch.randint(0, 90, (1,), generator=g))  # providers deliver as much as they have
            for x in torch.randn(size, 8, generator=g):
                yield x, (x[:2].sum() > x[2:4].sum()).long()


@torch.no_grad()
def evaluate(net, device):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(203, 8, generator=g)[dist.get_rank() :: dist.get_world_size()].to(device)
    y = (x[:, :2].sum(1) > x[:, 2:4].sum(1)).long()
    counts = torch.tensor([(net(x).argmax(1) == y).sum(), len(y)], device=device)
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    reader = ShardReader(args.shards, rank, world, seed=0)
    loader = DataLoader(reader, args.batch_size // world, num_workers=1, pin_memory=cuda)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        reader.set_epoch(epoch)
        with model.join():
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
                optimizer.step()
        acc = evaluate(net, device)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
