"""Tiny DDPM on digits with Accelerate: accumulation, EMA weights, best state by fixed-noise validation loss."""
import math

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

T = 100
EPOCHS = 4
BETAS = torch.linspace(1e-3, 0.08, T)
ALPHA_BAR = torch.cumprod(1 - BETAS, 0)
OUT = "out/f12"


class EpsNet(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.register_buffer("freqs", torch.exp(-math.log(1e3) * torch.arange(16) / 16))
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Linear(64, width)
        self.mid = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.out = nn.Linear(width, 64)

    def forward(self, x, t):
        angle = t[:, None].float() * self.freqs
        h = self.inp(x) + self.time(torch.cat([angle.sin(), angle.cos()], -1))
        return self.out(torch.nn.functional.silu(h + self.mid(h)))


def noised(x, t, eps):
    a = ALPHA_BAR[t][:, None]
    return a.sqrt() * x + (1 - a).sqrt() * eps


def datasets():
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 8.0 - 1.0
    g = torch.Generator().manual_seed(123)
    x = x[torch.randperm(len(x), generator=g)]
    train, val = x[:1440], x[1440:]
    # time and noise of the validation samples are drawn once, so that epochs can be compared
    t = torch.randint(0, T, (len(val),), generator=g)
    eps = torch.randn(val.shape, generator=g)
    return TensorDataset(train), TensorDataset(val, t, eps)


@torch.no_grad()
def validation_loss(accelerator, net, loader):
    net.eval()
    losses = []
    for x, t, eps in loader:
        per_sample = (net(noised(x, t, eps), t) - eps).square().mean(1)
        losses.append(accelerator.gather_for_metrics(per_sample))
    return torch.cat(losses).mean().item()


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(6)
    train, val = datasets()
    train_loader = DataLoader(train, batch_size=16, shuffle=True)
    val_loader = DataLoader(val, batch_size=50)
    net = EpsNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    net, optimizer, train_loader, val_loader = accelerator.prepare(net, optimizer, train_loader, val_loader)

    # kept out of prepare(): counts updates and is stepped by hand, once an update
    updates = EPOCHS * math.ceil(len(train_loader) / accelerator.gradient_accumulation_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / updates)))
    ema = AveragedModel(accelerator.unwrap_model(net), multi_avg_fn=get_ema_multi_avg_fn(0.95))
    accelerator.register_for_checkpointing(schedule, ema)
    set_seed(6, device_specific=True)  # from here on t and noise are each process' own

    best, done = math.inf, 0
    for epoch in range(EPOCHS):
        net.train()
        running = torch.zeros((), device=accelerator.device)
        for (x,) in train_loader:
            with accelerator.accumulate(net):
                t = torch.randint(0, T, (len(x),))
                eps = torch.randn_like(x)
                loss = (net(noised(x, t, eps), t) - eps).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
                ema.update_parameters(accelerator.unwrap_model(net))
                done += 1
            running += loss.detach()
        train_loss = accelerator.reduce(running / len(train_loader), "mean").item()
        score = validation_loss(accelerator, ema, val_loader)
        accelerator.print(f"epoch {epoch}: train {train_loss:.4f}, ema validation {score:.4f}, updates {done}")
        if score < best:
            best = score
            accelerator.save_state(OUT)

    accelerator.wait_for_everyone()
    accelerator.load_state(OUT)
    again = validation_loss(accelerator, ema, val_loader)
    accelerator.print(f"restored best: {again:.4f} (recorded {best:.4f})")

    # each process draws its own samples, the statistics are taken over all
    ema.eval()
    x = torch.randn(64, 64)
    with torch.no_grad():
        for step in reversed(range(T)):
            a, b = ALPHA_BAR[step], ALPHA_BAR[step - 1] if step else torch.tensor(1.0)
            x0 = ((x - (1 - a).sqrt() * ema(x, torch.full((64,), step))) / a.sqrt()).clamp(-1, 1)
            x = b.sqrt() * x0 + (1 - b).sqrt() * (x - a.sqrt() * x0) / (1 - a).sqrt()
    samples = accelerator.gather(x)
    accelerator.print(f"{len(samples)} samples, mean {samples.mean():.3f}, std {samples.std():.3f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
