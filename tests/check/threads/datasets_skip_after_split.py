import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Shards:
    def __init__(self, shards):
        self.shards = shards

    def __iter__(self):
        for x, y in self.shards:
            yield from zip(x, y, strict=True)

    def shard_data_sources(self, num_shards, index):
        return Shards(self.shards[index::num_shards])


class Skip:
    def __init__(self, source, n, split_when_sharding=False):
        self.source, self.n, self.split_when_sharding = source, n, split_when_sharding

    def __iter__(self):
        return itertools.islice(self.source, self.n, None)

    def shard_data_sources(self, num_shards, index):
        if not self.split_when_sharding:
            return self
        return Skip(self.source.shard_data_sources(num_shards, index), self.n // num_shards, True)


class Stream(IterableDataset):
    """Streams the examples of this node's shards, shuffled anew in each epoch."""

    def __init__(self, source, rank=0, world=1):
        self.source, self.rank, self.world, self.epoch = source, rank, world, 0

    def split_by_node(self, rank, world):
        return Stream(self.source, rank, world)

    def skip(self, n):
        return Stream(Skip(self.source, n), self.rank, self.world)

    def __iter__(self):
        examples = list(self.source.shard_data_sources(self.world, self.rank))
        for i in torch.randperm(len(examples), generator=torch.Generator().manual_seed(self.epoch)):
            yield examples[i]


def make_shards(count, size, seed):
    x = torch.randn(count * size, 12, generator=torch.Generator().manual_seed(seed))
    y = (x[:, :4].sum(1) > x[:, 4:8].abs().sum(1) - 3).long()
    return list(zip(x.split(size), y.split(size), strict=True))


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    stream = Stream(Shards(make_shards(8, 80, 1))).split_by_node(rank, world).skip(64)
    loader = DataLoader(stream, 64 // world, num_workers=1, pin_memory=cuda)
    (val,) = make_shards(1, 202, 2)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 2)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        stream.epoch = epoch
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        with torch.no_grad():
            x, y = (t[rank::world].to(device) for t in val)
            counts = torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)], device=device)
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: val accuracy {counts[0].item() / counts[1].item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
