"""Tiny DDPM on 2-D spirals, with an exponential moving average of the weights."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

T, EPOCHS, BATCH, SEED, OUT = 50, 3, 64, 2024, "./out/d08"


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    r = torch.rand(n, generator=g).sqrt() * 3 * torch.pi
    pts = torch.stack([r.cos() * r, r.sin() * r], 1) / 6.0
    return pts + 0.03 * torch.randn(n, 2, generator=g)


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp = nn.Linear(2, width)
        self.net = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width),
                                 nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.net(self.inp(x) + self.time(t))


class EMA:
    def __init__(self, model, decay=0.98):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


class Schedule:
    def __init__(self):
        self.beta = torch.linspace(1e-3, 0.15, T)
        self.alpha = 1 - self.beta
        self.abar = self.alpha.cumprod(0)

    def noise(self, x, t, eps):
        a = self.abar[t][:, None]
        return a.sqrt() * x + (1 - a).sqrt() * eps

    @torch.no_grad()
    def sample(self, net, n):
        x = torch.randn(n, 2)
        for i in reversed(range(T)):
            eps = net(x, torch.full((n,), i))
            x = (x - self.beta[i] / (1 - self.abar[i]).sqrt() * eps) / self.alpha[i].sqrt()
            if i:
                x = x + self.beta[i].sqrt() * torch.randn_like(x)
        return x


@torch.no_grad()
def val_loss(net, sch, points):
    g = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(4):
        t = torch.randint(0, T, (len(points),), generator=g)
        eps = torch.randn(points.shape, generator=g)
        total += F.mse_loss(net(sch.noise(points, t, eps), t), eps).item()
    return total / 4


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    data, held_out = TensorDataset(spirals(3840, 1)), spirals(500, 2)
    sampler = DistributedSampler(data, shuffle=True, seed=SEED)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)

    net, sch = Denoiser(), Schedule()
    ema = EMA(net)
    ddp = DDP(net)
    opt = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    torch.manual_seed(SEED + 1 + rank)

    if rank == 0:
        os.makedirs(OUT, exist_ok=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for (x,) in loader:
            t = torch.randint(0, T, (len(x),))
            eps = torch.randn_like(x)
            loss = F.mse_loss(ddp(sch.noise(x, t, eps), t), eps)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update(net)
            running += loss.detach()
        dist.reduce(running, dst=0)
        if rank == 0:
            print(f"epoch {epoch} train {running.item() / len(loader) / world:.4f} "
                  f"held-out {val_loss(ema.model, sch, held_out):.4f}", flush=True)
            torch.save({"net": net.state_dict(), "ema": ema.model.state_dict()}, f"{OUT}/ckpt.pt")
        dist.barrier()

    mine = sch.sample(ema.model, 500 // world)
    parts = [torch.empty_like(mine) for _ in range(world)] if rank == 0 else None
    dist.gather(mine, parts, dst=0)
    if rank == 0:
        samples = torch.cat(parts)
        print(f"energy distance {energy_distance(samples, held_out):.4f} over {len(samples)} samples")
        torch.save(samples, f"{OUT}/samples.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
