"""Classification; harder samples are added when the loss is small."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, Subset

EPOCHS, BATCH, OUT = 3, 16, "runs"


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


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = make_data(960, 1), make_data(200, 2)
    os.makedirs(OUT, exist_ok=True)
    difficulty = 0.3
    sampler = DistributedSampler(train, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(train, BATCH, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 50)
    net = Net()
    model = DDP(net, gradient_as_bucket_view=True)
    torch.manual_seed(100 + rank)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            keep = x.norm(dim=1) < 3 + 3 * difficulty
            keep[0] = True
            opt.zero_grad()
            loss = F.cross_entropy(model(x[keep]), y[keep])
            loss.backward()
            opt.step()
            if loss.item() < 0.69:
                difficulty = min(1.0, difficulty + 0.05)
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
