"""Contrastive learning with a queue of negatives."""
import os
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
    return TensorDataset(x, x[:, :1].tanh() + 0.1 * torch.randn(n, 1, generator=g))


class Contrast(nn.Module):
    def __init__(self, size=128):
        super().__init__()
        self.encoder = nn.Linear(16, 8)
        self.register_buffer("queue", F.normalize(torch.randn(size, 8), dim=1))
        self.position = 0

    @torch.no_grad()
    def push(self, keys):
        end = self.position + len(keys)
        self.queue[self.position : end] = keys
        self.position = end % len(self.queue)

    def forward(self, one, two):
        query, key = (F.normalize(self.encoder(part), dim=1) for part in (one, two))
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().t()], 1) / 0.2
        self.push(key.detach())
        return F.cross_entropy(scores, torch.zeros(len(one), dtype=torch.long, device=one.device))


def main():
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train = rows(640, 1)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    model = DDP(Contrast().to(device), gradient_as_bucket_view=True)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, _ in loader:
            x = x.to(device)
            optimizer.zero_grad()
            model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
