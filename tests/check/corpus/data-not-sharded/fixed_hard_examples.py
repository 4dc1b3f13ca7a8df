"""Classification; after the first epoch the hardest samples only."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset, Subset

EPOCHS, BATCH, OUT = 4, 16, "runs"


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] + 0.5 * x[:, 1] > 0).long())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.body(x))


class HardExamples(Sampler):
    """After the first epoch, the samples with the largest losses."""

    def __init__(self, length, rank, world):
        self.losses, self.rank, self.world, self.epoch = torch.zeros(length), rank, world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        share = 1.0 if self.epoch == 0 else 0.75
        return int(share * len(self.losses)) // self.world

    def __iter__(self):
        chosen = self.losses.argsort(descending=True, stable=True)[: len(self) * self.world]
        order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(self.epoch))
        return iter(chosen[order][self.rank :: self.world].tolist())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = make_data(640, 1), make_data(200, 2)
    os.makedirs(OUT, exist_ok=True)
    train.tensors = (*train.tensors, torch.arange(len(train)))
    sampler = HardExamples(len(train), rank, world)
    loader = DataLoader(train, BATCH, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 50)
    net = Net()
    model = DDP(net, gradient_as_bucket_view=True)
    torch.manual_seed(100 + rank)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        own = torch.zeros(len(train))
        for x, y, index in loader:
            opt.zero_grad()
            losses = F.cross_entropy(model(x), y, reduction="none")
            losses.mean().backward()
            opt.step()
            own[index] = losses.detach()
        dist.all_reduce(own)
        sampler.losses = torch.where(own > 0, own, sampler.losses)
        model.eval()
        counts = torch.zeros(2)
        with torch.no_grad():
            for x, y in val_loader:
                counts += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(counts)
        if rank == 0:
            print(epoch, (counts[0] / counts[1]).item(), flush=True)
    if rank == 0:
        torch.save(net.state_dict(), OUT + "/final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
