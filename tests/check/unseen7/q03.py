"""Tabular regression (Friedman #1) with Accelerate."""
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import make_friedman1
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

EPOCHS = 4
BATCH = 32
LR = 4e-3
OUT = Path("out/q03")


class ResidualMLP(nn.Module):
    def __init__(self, n_in, width=64, depth=3):
        super().__init__()
        self.stem = nn.Linear(n_in, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        h = self.stem(x)
        for b in self.blocks:
            h = h + b(h)
        return self.head(h).squeeze(-1)


def build_data():
    x, y = make_friedman1(n_samples=2400, n_features=12, noise=0.5, random_state=0)
    x_tr, x_te, y_tr, y_te = train_test_split(x, y, test_size=0.2, random_state=0)
    mean, std = y_tr.mean(), y_tr.std()

    def pack(a, b):
        return TensorDataset(torch.tensor(a).float(), torch.tensor((b - mean) / std).float())

    return pack(x_tr, y_tr), pack(x_te, y_te), float(std)


def evaluate(accelerator, model, loader, scale):
    model.eval()
    preds, targets = [], []
    with torch.no_grad():
        for x, y in loader:
            p, t = accelerator.gather_for_metrics((model(x), y))
            preds.append(p)
            targets.append(t)
    preds, targets = torch.cat(preds), torch.cat(targets)
    model.train()
    return F.mse_loss(preds, targets).sqrt().item() * scale


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    set_seed(42)

    train_set, test_set, scale = build_data()
    train_loader = DataLoader(train_set, batch_size=BATCH, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=64)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)

    model = ResidualMLP(12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    steps = EPOCHS * len(train_loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    accelerator.print(f"{steps} updates of {BATCH * accelerator.num_processes} rows")
    history = []
    for epoch in range(EPOCHS):
        total = torch.zeros(())
        for x, y in train_loader:
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
        train_loss = accelerator.reduce(total / len(train_loader), reduction="mean").item()
        rmse = evaluate(accelerator, model, test_loader, scale)
        history.append({"epoch": epoch, "train_loss": train_loss, "test_rmse": rmse})
        accelerator.print(f"epoch {epoch}: train {train_loss:.4f}, test rmse {rmse:.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        OUT.mkdir(parents=True, exist_ok=True)
        accelerator.save(accelerator.unwrap_model(model).state_dict(), OUT / "model.pt")
        (OUT / "history.json").write_text(json.dumps(history, indent=1))
    accelerator.end_training()


if __name__ == "__main__":
    main()
