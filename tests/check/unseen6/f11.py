"""Heavy-tailed regression on tabular data with a residual MLP, FSDP2, SGD with own gradient clipping."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman1
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, h):
        return h + self.down(torch.relu(self.up(self.norm(h))))


class Regressor(nn.Module):
    def __init__(self, n_in, width=48, depth=3):
        super().__init__()
        self.stem = nn.Linear(n_in, width)
        self.trunk = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.trunk(self.stem(x))).squeeze(-1)


def tabular(n, seed):
    x, y = make_friedman1(n, n_features=16, noise=0.5, random_state=seed)
    x = torch.tensor(x, dtype=torch.float32) - 0.5
    y = torch.tensor(y, dtype=torch.float32)
    g = torch.Generator().manual_seed(seed)
    spikes = torch.rand(n, generator=g) < 0.04
    y = torch.where(spikes, y + 25 * torch.randn(n, generator=g), y)
    return TensorDataset(x, (y - 14.4) / 5.0)


def clip_gradients(model, max_norm):
    """Scale the gradients in place so that their norm is at most max_norm."""
    grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    torch._foreach_mul_(grads, factor.item())
    return total


@torch.no_grad()
def evaluate(model, data, rank, world):
    x, y = data.tensors
    part = len(x) // world
    rows = slice(rank * part, (rank + 1) * part)
    model.eval()
    err = (model(x[rows]) - y[rows]).abs()
    sums = torch.stack([err.sum(), torch.tensor(float(part))])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(2)
    model = Regressor(16)
    for block in model.trunk:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    train, test = tabular(1536, 0), tabular(400, 1)
    sampler = DistributedSampler(train, shuffle=True, seed=31)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    epochs = 4
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))

    begun = time.time()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            clip_gradients(model, max_norm=0.5)
            optimizer.step()
            schedule.step()
            total += loss.detach()
        dist.all_reduce(total)
        mae = evaluate(model, test, rank, world)
        if rank == 0:
            mean = total.item() / (world * len(loader))
            print(f"{time.time() - begun:6.1f}s  epoch {epoch}  mse {mean:.4f}  test mae {mae:.4f}")

    weights = {name: t.full_tensor() for name, t in model.state_dict().items()}
    if rank == 0:
        os.makedirs("out/f11", exist_ok=True)
        torch.save(weights, "out/f11/regressor.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
