"""Tiny diffusion model of 2-d points, in the style of the diffusers examples."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

T = 50
ALPHA_BAR = torch.cumprod(1 - torch.linspace(1e-3, 0.12, T), 0)


class EpsilonModel(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.time = nn.Embedding(T, hidden)
        self.inp = nn.Linear(2, hidden)
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2))

    def forward(self, x, t):
        return self.out(self.inp(x) + self.time(t))


def circle(n, seed):
    a = torch.rand(n, generator=torch.Generator().manual_seed(seed)) * 6.2832
    return TensorDataset(torch.stack([a.cos(), a.sin()], 1))


def add_noise(x, noise, t):
    a = ALPHA_BAR.to(x.device)[t, None]
    return a.sqrt() * x + (1 - a).sqrt() * noise


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--train_batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(args.seed)
    pin = torch.cuda.is_available()
    train_dl = DataLoader(circle(1280, 1), args.train_batch_size // accelerator.num_processes, shuffle=True, num_workers=1, pin_memory=pin)
    eval_dl = DataLoader(circle(200, 2), 50, num_workers=1, pin_memory=pin)
    model = EpsilonModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)

    for epoch in range(args.num_train_epochs):
        model.train()
        for (points,) in train_dl:
            noise = torch.randn_like(points)
            timesteps = torch.randint(0, T, (len(points),), device=points.device)
            loss = F.mse_loss(model(add_noise(points, noise, timesteps), timesteps), noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        errors = []
        for i, (points,) in enumerate(eval_dl):
            g = torch.Generator().manual_seed(1000 * i + accelerator.process_index)
            noise = torch.randn(points.shape, generator=g).to(points.device)
            timesteps = torch.randint(0, T, (len(points),), generator=g).to(points.device)
            with torch.no_grad():
                pred = model(add_noise(points, noise, timesteps), timesteps)
            errors.append(accelerator.gather_for_metrics(((pred - noise) ** 2).mean(1)))
        accelerator.print(f"epoch {epoch}: eval mse {torch.cat(errors).mean().item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
