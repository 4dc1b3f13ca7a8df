"""DDPM on 8x8 digits with Lightning Fabric."""
import copy
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

T = 100
EPOCHS = 3
BATCH = 16
ACCUM = 2
OUT = Path("out/p07")


def cosine_alpha_bar():
    s = torch.linspace(0, 1, T + 1)
    f = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
    return (f / f[0])[1:].clamp(1e-4, 0.9999)


class Denoiser(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.temb = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 2 * c))
        self.a = nn.Conv2d(1, c, 3, padding=1)
        self.b = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1))
        self.c = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), nn.Dropout(0.05), nn.Conv2d(c, c, 3, padding=1))
        self.o = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), nn.Conv2d(c, 1, 3, padding=1))
        self.register_buffer("freq", torch.exp(-torch.arange(16) * 0.5))

    def forward(self, x, t):
        ang = t[:, None].float() * self.freq
        scale, shift = self.temb(torch.cat([ang.sin(), ang.cos()], 1))[..., None, None].chunk(2, 1)
        h = self.a(x)
        h = h + self.b(h) * (1 + scale) + shift
        h = h + self.c(h)
        return self.o(h)


class Ema:
    def __init__(self, net, decay):
        self.net, self.decay, self.n = copy.deepcopy(net).requires_grad_(False).eval(), decay, 0

    @torch.no_grad()
    def update(self, params):
        self.n += 1
        d = min(self.decay, self.n / (self.n + 9))
        for e, p in zip(self.net.parameters(), params):
            e.lerp_(p, 1 - d)


def noised(x0, abar, gen):
    t = torch.randint(0, T, (len(x0),), generator=gen)
    eps = torch.randn(x0.shape, generator=gen)
    a = abar[t].view(-1, 1, 1, 1)
    return a.sqrt() * x0 + (1 - a).sqrt() * eps, t, eps


@torch.no_grad()
def validation_loss(fabric, net, loader, abar):
    gen = torch.Generator().manual_seed(77 + fabric.global_rank)
    stat = torch.zeros(2)
    for (x0,) in loader:
        xt, t, eps = noised(x0, abar, gen)
        stat += torch.tensor([F.mse_loss(net(xt, t), eps, reduction="sum").item(), eps.numel()])
    stat = fabric.all_reduce(stat, reduce_op="sum")
    return (stat[0] / stat[1]).item()


@torch.no_grad()
def sample(net, abar, n, gen):
    x = torch.randn(n, 1, 8, 8, generator=gen)
    for i in reversed(range(T)):
        prev = abar[i - 1] if i > 0 else torch.tensor(1.0)
        eps = net(x, torch.full((n,), i))
        x0 = ((x - (1 - abar[i]).sqrt() * eps) / abar[i].sqrt()).clamp(-1, 1)
        x = prev.sqrt() * x0 + (1 - prev).sqrt() * eps
    return x


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(5, verbose=False)

    imgs = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8.0 - 1.0
    imgs = imgs[torch.randperm(len(imgs), generator=torch.Generator().manual_seed(0))]
    train_dl = DataLoader(TensorDataset(imgs[:1280]), BATCH, shuffle=True, drop_last=True)
    val_dl = DataLoader(TensorDataset(imgs[1280:1796]), 43)
    train_dl, val_dl = fabric.setup_dataloaders(train_dl, val_dl)

    net = Denoiser()
    ema = Ema(net, 0.98)
    model, opt = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=2e-3))
    abar = cosine_alpha_bar()

    torch.manual_seed(500 + fabric.global_rank)
    noise = torch.Generator().manual_seed(9000 + fabric.global_rank)
    best = float("inf")
    for epoch in range(EPOCHS):
        model.train()
        for i, (x0,) in enumerate(train_dl):
            hold = (i + 1) % ACCUM != 0
            with fabric.no_backward_sync(model, enabled=hold):
                xt, t, eps = noised(x0, abar, noise)
                fabric.backward(F.mse_loss(model(xt, t), eps) / ACCUM)
            if not hold:
                fabric.clip_gradients(model, opt, max_norm=1.0)
                opt.step()
                opt.zero_grad()
                ema.update(model.parameters())
        val = validation_loss(fabric, ema.net, val_dl, abar)
        fabric.print(f"epoch {epoch} ema val mse {val:.4f}")
        if val < best:
            best = val
            fabric.save(OUT / "best.ckpt", {"ema": ema.net.state_dict(), "epoch": epoch, "val": val})

    fabric.barrier()
    ema.net.load_state_dict(fabric.load(OUT / "best.ckpt")["ema"])
    if fabric.is_global_zero:
        torch.save(sample(ema.net, abar, 16, torch.Generator().manual_seed(1)), OUT / "samples.pt")
    fabric.barrier()


if __name__ == "__main__":
    main()
