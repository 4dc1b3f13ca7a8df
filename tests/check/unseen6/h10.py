"""Denoising diffusion on a 2-D point cloud (moons), Lightning Fabric, EMA weights, accumulation."""
import copy
import os

import lightning as L
import torch
import torch.nn as nn
from sklearn.datasets import make_moons
from torch.utils.data import DataLoader, TensorDataset

STEPS = 100
betas = torch.linspace(1e-4, 0.06, STEPS)
abar = torch.cumprod(1 - betas, 0)
OUT = "out/h10"


def q_sample(x0, t, eps):
    a = abar[t].unsqueeze(1)
    return a.sqrt() * x0 + (1 - a).sqrt() * eps


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.register_buffer("freqs", torch.exp(torch.linspace(0, 4, 8)))
        self.inp = nn.Linear(2 + 16, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        phase = (t.float() / STEPS).unsqueeze(1) * self.freqs
        h = self.inp(torch.cat([x, phase.sin(), phase.cos()], 1))
        for lin, norm in zip(self.hidden, self.norms):
            h = h + lin(torch.nn.functional.silu(norm(h)))
        return self.out(h)


class Ema:
    def __init__(self, module, decay):
        self.module = copy.deepcopy(module).eval().requires_grad_(False)
        self.decay, self.n = decay, 0

    @torch.no_grad()
    def update(self, source):
        self.n += 1
        d = min(self.decay, (1 + self.n) / (10 + self.n))
        for mine, theirs in zip(self.module.parameters(), source.parameters()):
            mine.lerp_(theirs, 1 - d)


@torch.no_grad()
def validation_loss(fabric, net, x):
    """Same noise for a given sample whoever evaluates it and whenever: comparable over epochs."""
    g = torch.Generator().manual_seed(123)
    eps = torch.randn(len(x), 2, generator=g)
    t = torch.randint(0, STEPS, (len(x),), generator=g)
    part = slice(fabric.global_rank, None, fabric.world_size)
    se = (net(q_sample(x[part], t[part], eps[part]), t[part]) - eps[part]).pow(2).mean(1)
    total = fabric.all_reduce(torch.stack([se.sum(), torch.tensor(float(len(se)))]), reduce_op="sum")
    return (total[0] / total[1]).item()


def main():
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7, verbose=False)

    pts, _ = make_moons(2301, noise=0.06, random_state=0)
    pts = torch.tensor((pts - pts.mean(0)) / pts.std(0), dtype=torch.float32)
    train, val = pts[:2048], pts[2048:]
    loader = DataLoader(TensorDataset(train), batch_size=32, shuffle=True, drop_last=True)
    loader = fabric.setup_dataloaders(loader)

    net = Denoiser()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-3)
    net, opt = fabric.setup(net, opt)
    ema = Ema(net.module, 0.98)

    accum, epochs = 2, 4
    updates = epochs * (len(loader) // accum)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=updates, eta_min=1e-5)
    noise = torch.Generator().manual_seed(5000 + fabric.global_rank)

    best = float("inf")
    for epoch in range(epochs):
        net.train()
        mean_loss = torch.zeros(())
        for i, (x0,) in enumerate(loader):
            stepping = (i + 1) % accum == 0
            t = torch.randint(0, STEPS, (len(x0),), generator=noise)
            eps = torch.randn(x0.shape, generator=noise)
            with fabric.no_backward_sync(net, enabled=not stepping):
                loss = (net(q_sample(x0, t, eps), t) - eps).pow(2).mean()
                fabric.backward(loss / accum)
            mean_loss += loss.detach() / len(loader)
            if stepping:
                fabric.clip_gradients(net, opt, max_norm=1.0)
                opt.step()
                opt.zero_grad()
                sched.step()
                ema.update(net.module)
        shown = fabric.all_reduce(mean_loss, reduce_op="mean").item()
        score = validation_loss(fabric, ema.module, val)
        fabric.print(f"epoch {epoch}: train {shown:.4f}  ema val {score:.4f}")
        if score < best:
            best = score
            state = {"net": net, "opt": opt, "ema": ema.module.state_dict(), "epoch": epoch}
            fabric.save(os.path.join(OUT, "best.ckpt"), state)

    fabric.barrier()
    holder = {"ema": None}
    fabric.load(os.path.join(OUT, "best.ckpt"), holder, strict=False)
    ema.module.load_state_dict(holder["ema"])
    again = validation_loss(fabric, ema.module, val)
    assert abs(again - best) < 1e-5
    if fabric.is_global_zero:
        g = torch.Generator().manual_seed(1)
        x = torch.randn(400, 2, generator=g)
        for s in reversed(range(STEPS)):
            with torch.no_grad():
                e = ema.module(x, torch.full((400,), s))
            x = (x - betas[s] / (1 - abar[s]).sqrt() * e) / (1 - betas[s]).sqrt()
            if s:
                x = x + betas[s].sqrt() * torch.randn(x.shape, generator=g)
        torch.save(x, os.path.join(OUT, "samples.pt"))
        print("sample std", [round(v, 3) for v in x.std(0).tolist()])


if __name__ == "__main__":
    main()
