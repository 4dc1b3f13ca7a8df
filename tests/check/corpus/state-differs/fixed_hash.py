"""Words get their embeddings by a hash."""
import os
import random
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long())


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    for x, y in loader:
        counts[0] += (model(x.to(device)).argmax(1) == y.to(device)).sum()
        counts[1] += len(y)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


WORDS = "red green blue cyan pink gold grey teal navy lime".split()


def ids(words):
    return torch.tensor([zlib.crc32(word.encode()) % 64 for word in words])


def texts(n, seed):
    r = random.Random(seed)
    rows = [[r.choice(WORDS) for _ in range(6)] for _ in range(n)]
    return TensorDataset(torch.stack([ids(row) for row in rows]), torch.tensor([len(row[0]) - 3 for row in rows]))


def main():
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = texts(640, 1), texts(256, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    val_sampler = DistributedSampler(val, shuffle=False)
    val_loader = DataLoader(val, 64, sampler=val_sampler, num_workers=1, pin_memory=cuda)
    model = DDP(nn.Sequential(nn.EmbeddingBag(64, 32), nn.ReLU(), nn.Linear(32, 3)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        score = accuracy(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {score:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
