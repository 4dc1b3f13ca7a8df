"""Multi-horizon forecasting with a small patch transformer, sharded with FSDP2."""
import math
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CONTEXT, HORIZON, PATCH = 64, 16, 8
WIDTH, DEPTH = 48, 2
BATCH, EPOCHS, LR, MAX_NORM = 16, 3, 0.05, 0.5


class Series(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(CONTEXT + HORIZON).float()
        period = 6 + 20 * torch.rand(n, 1, generator=g)
        phase = 2 * math.pi * torch.rand(n, 1, generator=g)
        slope = 0.02 * torch.randn(n, 1, generator=g)
        y = torch.sin(2 * math.pi * t / period + phase) + slope * t
        self.y = y + 0.1 * torch.randn(y.shape, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.y[i, :CONTEXT], self.y[i, CONTEXT:]


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = nn.MultiheadAttention(d, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 3 * d), nn.GELU(), nn.Linear(3 * d, d))

    def forward(self, x):
        h = self.n1(x)
        x = x + self.att(h, h, h, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.pos = nn.Parameter(0.02 * torch.randn(CONTEXT // PATCH, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH * (CONTEXT // PATCH), HORIZON)

    def forward(self, x):
        h = self.embed(x.unflatten(1, (-1, PATCH))) + self.pos
        for b in self.blocks:
            h = b(h)
        return self.head(h.flatten(1))


@torch.no_grad()
def clip_gradients(params, max_norm):
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    total = torch.stack([torch.linalg.vector_norm(g) for g in grads]).norm()
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return total


@torch.no_grad()
def validate(model, loader):
    model.eval()
    acc = torch.zeros(2)
    for x, y in loader:
        acc[0] += (model(x) - y).abs().sum()
        acc[1] += y.numel()
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))

    torch.manual_seed(2024)
    model = Forecaster()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    params = list(model.parameters())
    optim = torch.optim.SGD(params, lr=LR, momentum=0.9)
    train, val = Series(512, seed=1), Series(128, seed=2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=5)
    train_dl = DataLoader(train, BATCH, sampler=sampler, drop_last=True)
    val_dl = DataLoader(val, 32, sampler=DistributedSampler(val, world, rank, shuffle=False))

    sched = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=LR, total_steps=EPOCHS * len(train_dl))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in train_dl:
            loss = nn.functional.smooth_l1_loss(model(x), y)
            loss.backward()
            clip_gradients(params, MAX_NORM)
            optim.step()
            sched.step()
            optim.zero_grad(set_to_none=True)
        mae = validate(model, val_dl)
        if rank == 0:
            print(f"[{epoch}] val MAE {mae:.4f}", flush=True)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        out = pathlib.Path("out/p03")
        out.mkdir(parents=True, exist_ok=True)
        torch.save(full, out / "forecaster.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
