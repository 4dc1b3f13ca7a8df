"""Multi-step load forecasting with a GRU (Accelerate)."""
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

CFG = dict(window=36, horizon=6, batch_size=32, epochs=3, lr=1.5e-2, warmup=0.1, clip=1.0, seed=2024)


class LoadSeries(Dataset):
    def __init__(self, series, window, horizon):
        self.series, self.window, self.horizon = series, window, horizon

    def __len__(self):
        return len(self.series) - self.window - self.horizon + 1

    def __getitem__(self, i):
        x = self.series[i:i + self.window]
        y = self.series[i + self.window:i + self.window + self.horizon]
        return x.unsqueeze(-1), y


def make_series(n=1900):
    g = torch.Generator().manual_seed(5)
    t = torch.arange(n, dtype=torch.float32)
    s = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.sin(2 * math.pi * t / 168) + 0.0003 * t
    return s + 0.15 * torch.randn(n, generator=g)


class Forecaster(nn.Module):
    def __init__(self, horizon, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, horizon))

    def forward(self, x):
        _, h = self.rnn(x)
        return self.head(h[-1])


def warmup_linear(total_steps, warmup_steps):
    def fn(step):
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
    return fn


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    preds, targets = [], []
    for x, y in loader:
        p, t = accelerator.gather_for_metrics((model(x), y))
        preds.append(p)
        targets.append(t)
    model.train()
    preds, targets = torch.cat(preds), torch.cat(targets)
    return F.mse_loss(preds, targets).sqrt().item(), F.l1_loss(preds, targets).item()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(CFG["seed"])

    series = make_series()
    cut = 1500
    mean, std = series[:cut].mean(), series[:cut].std()
    series = (series - mean) / std
    train_ds = LoadSeries(series[:cut], CFG["window"], CFG["horizon"])
    val_ds = LoadSeries(series[cut - CFG["window"]:], CFG["window"], CFG["horizon"])
    train_loader = DataLoader(train_ds, batch_size=CFG["batch_size"], shuffle=True, drop_last=True)
    val_loader = DataLoader(val_ds, batch_size=64)

    model = Forecaster(CFG["horizon"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG["lr"])
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

    total_steps = len(train_loader) * CFG["epochs"]
    scheduler = LambdaLR(optimizer, warmup_linear(total_steps, max(1, int(CFG["warmup"] * total_steps))))
    scheduler = accelerator.prepare(scheduler)

    for epoch in range(CFG["epochs"]):
        running = torch.zeros(2)
        for x, y in train_loader:
            loss = F.smooth_l1_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CFG["clip"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            running += torch.tensor([loss.item(), 1.0])
        running = accelerator.reduce(running, reduction="sum")
        rmse, mae = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: train {running[0] / running[1]:.4f} rmse {rmse:.4f} mae {mae:.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs("./out/c03", exist_ok=True)
        weights = accelerator.unwrap_model(model).state_dict()
        torch.save({"model": weights, "mean": mean, "std": std, "cfg": CFG}, "./out/c03/gru.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
