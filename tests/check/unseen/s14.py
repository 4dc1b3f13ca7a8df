"""Sharded training of a deep MLP classifier (FSDP2)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class DeepNet(nn.Module):
    def __init__(self, dim=48, depth=4):
        super().__init__()
        self.stem = nn.Linear(64, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_model_and_optimizer(device, lr):
    torch.manual_seed(0)
    model = DeepNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optimizer


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")

    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X / 16).float(), torch.tensor(y).long()
    train = TensorDataset(X[:1440], y[:1440])
    vx, vy = X[1440:][rank::world].to(device), y[1440:][rank::world].to(device)
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=36, sampler=sampler)

    mesh = init_device_mesh(device.type, (world,))
    model, optimizer = build_model_and_optimizer(device, lr=2e-3)
    model = shard(model, mesh)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device=device)
        for x, t in loader:
            x, t = x.to(device), t.to(device)
            loss = F.cross_entropy(model(x), t)
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.detach()
        model.eval()
        with torch.no_grad():
            right = (model(vx).argmax(1) == vy).sum().float()
        report = torch.stack([total, right, torch.tensor(float(len(vy)), device=device)])
        dist.all_reduce(report)
        if rank == 0:
            print(f"epoch {epoch} loss {report[0] / len(loader) / world:.4f} acc {report[1] / report[2]:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
