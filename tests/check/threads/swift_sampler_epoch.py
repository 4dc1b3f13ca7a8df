import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ParallelSampler(Sampler):
    """The samples of this rank's data parallel group, in an order of each epoch."""

    def __init__(self, dataset, rank, world, seed=42):
        self.dataset, self.rank, self.world, self.seed, self.epoch = dataset, rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.dataset) // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=g)[: len(self) * self.world]
        return iter(order[self.rank :: self.world].tolist())


class DataLoaderShard(DataLoader):
    def __init__(self, dataset, device, **kwargs):
        super().__init__(dataset, **kwargs)
        self.device = device

    def set_epoch(self, epoch):
        if self.batch_sampler is not None:
            inner = getattr(self.batch_sampler, "batch_sampler", self.batch_sampler)  # that of a resumed run skips batches
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)
        elif hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self):
        for batch in super().__iter__():
            yield [t.to(self.device) for t in batch]


def prompts(n, seed):
    tokens = torch.randint(0, 24, (n, 8), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, tokens[:, 0] % 6)


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(42)
    train, val = prompts(960, 1), prompts(202, 2)
    sampler = ParallelSampler(train, rank, world)
    loader = DataLoaderShard(train, device, batch_size=64 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    net = nn.Sequential(nn.Embedding(24, 16), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 6))
    model = DDP(net.to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for tokens, target in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), target).backward()
            optimizer.step()
        with torch.no_grad():
            tokens, target = (t[rank::world].to(device) for t in val.tensors)
            counts = torch.tensor([(model.module(tokens).argmax(1) == target).sum(), len(target)], device=device)
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: eval accuracy {counts[0].item() / counts[1].item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
