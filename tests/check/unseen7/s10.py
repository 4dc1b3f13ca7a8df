"""Denoising diffusion on 8x8 digits with Accelerate: accumulation, EMA weights, fixed validation noise."""
import copy
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

T, DIM, EPOCHS, BATCH, ACCUM = 100, 128, 4, 16, 2
OUT = Path("out/s10")

betas = torch.linspace(1e-4, 0.06, T)
alpha_bar = torch.cumprod(1 - betas, 0)


def datasets():
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    g = torch.Generator().manual_seed(0)
    x = x[torch.randperm(len(x), generator=g)]
    train, val = x[:1536], x[1536:]
    t = torch.randint(T, (len(val),), generator=g)
    noise = torch.randn(val.shape, generator=g)
    return TensorDataset(train), TensorDataset(val, t, noise)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("freq", torch.exp(-math.log(1e3) * torch.arange(16) / 16))
        self.inp = nn.Linear(64 + 32, DIM)
        self.mid = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM)) for _ in range(3))
        self.out = nn.Linear(DIM, 64)

    def forward(self, x, t):
        ang = t[:, None] * self.freq
        h = self.inp(torch.cat([x, ang.sin(), ang.cos()], 1))
        for layer in self.mid:
            h = h + layer(h)
        return self.out(h)


def per_sample_error(model, x, t, noise):
    a = alpha_bar[t][:, None]
    noisy = a.sqrt() * x + (1 - a).sqrt() * noise
    return (model(noisy, t) - noise).pow(2).mean(1)


@torch.no_grad()
def blend(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.lerp_(p, 1 - decay)


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM)
    set_seed(6)
    train, val = datasets()
    train_dl = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    val_dl = DataLoader(val, 32)
    model = Denoiser()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, opt, train_dl, val_dl = accelerator.prepare(model, opt, train_dl, val_dl)
    ema = copy.deepcopy(accelerator.unwrap_model(model)).requires_grad_(False).eval()

    updates = EPOCHS * len(train_dl) // ACCUM
    # plain scheduler, advanced by hand once for every real update
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt.optimizer, T_max=updates, eta_min=1e-5)
    set_seed(60, device_specific=True)  # timesteps and noise are drawn apart on each process

    done, best = 0, float("inf")
    for epoch in range(EPOCHS):
        model.train()
        for (x,) in train_dl:
            with accelerator.accumulate(model):
                t = torch.randint(T, (len(x),))
                loss = per_sample_error(model, x, t, torch.randn_like(x)).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            if accelerator.sync_gradients:
                sched.step()
                done += 1
                blend(ema, accelerator.unwrap_model(model), min(0.97, done / (done + 10)))

        errors = []
        with torch.no_grad():
            for x, t, noise in val_dl:
                errors.append(accelerator.gather_for_metrics(per_sample_error(ema, x, t, noise)))
        errors = torch.cat(errors)
        assert len(errors) == len(val)
        score = errors.mean().item()
        accelerator.print(f"epoch {epoch} updates {done}/{updates} val error {score:.4f}")
        if score < best:
            best = score
            if accelerator.is_main_process:
                OUT.mkdir(parents=True, exist_ok=True)
            accelerator.wait_for_everyone()
            accelerator.save({"ema": ema.state_dict(), "epoch": epoch, "error": score}, OUT / "best.pt")

    accelerator.wait_for_everyone()
    ema.load_state_dict(torch.load(OUT / "best.pt")["ema"])
    gen = torch.Generator().manual_seed(accelerator.process_index)
    x = torch.randn(8, 64, generator=gen)
    with torch.no_grad():
        for s in reversed(range(T)):
            eps = ema(x, torch.full((8,), s))
            x = (x - betas[s] / (1 - alpha_bar[s]).sqrt() * eps) / (1 - betas[s]).sqrt()
            if s:
                x = x + betas[s].sqrt() * torch.randn(x.shape, generator=gen)
    samples = accelerator.gather(x)
    accelerator.print("samples", tuple(samples.shape), f"mean {samples.mean():.3f} std {samples.std():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
