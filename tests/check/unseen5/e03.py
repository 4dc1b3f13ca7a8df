"""Tabular MLP with EMA weights, Accelerate version."""
import copy
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

CFG = dict(epochs=3, batch_size=16, accum=2, lr=3e-3, ema=0.95, patience=2, seed=11, out="./out/e03")


def synth(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    w = torch.randn(20, 4, generator=torch.Generator().manual_seed(999))
    y = (torch.tanh(x) @ w + 0.5 * torch.randn(n, 4, generator=g)).argmax(1)
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 64), nn.LayerNorm(64), nn.SiLU(), nn.Dropout(0.1),
            nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 4),
        )

    def forward(self, x):
        return self.layers(x)


@torch.no_grad()
def ema_update(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.lerp_(p.detach(), 1.0 - decay)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    losses, hits = [], []
    for x, y in loader:
        logits = model(x)
        loss = F.cross_entropy(logits, y, reduction="none")
        loss, hit = accelerator.gather_for_metrics((loss, (logits.argmax(1) == y).float()))
        losses.append(loss)
        hits.append(hit)
    losses, hits = torch.cat(losses), torch.cat(hits)
    return losses.mean().item(), hits.mean().item(), len(hits)


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=CFG["accum"])
    set_seed(CFG["seed"])
    train_loader = DataLoader(synth(1500, 1), batch_size=CFG["batch_size"], shuffle=True, drop_last=True)
    val_loader = DataLoader(synth(333, 2), batch_size=50)

    model = Net()
    ema = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG["lr"])
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

    updates_per_epoch = -(-len(train_loader) // CFG["accum"])
    warmup = 5
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / warmup) * max(0.05, 1 - s / (updates_per_epoch * CFG["epochs"]))
    )
    set_seed(CFG["seed"] + 100 * accelerator.process_index)

    best, bad = float("inf"), 0
    for epoch in range(CFG["epochs"]):
        model.train()
        total, seen = torch.zeros(()), 0
        for x, y in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    scheduler.step()
                    ema_update(ema, accelerator.unwrap_model(model), CFG["ema"])
            total += loss.detach()
            seen += 1

        train_loss = accelerator.reduce(total / seen, reduction="mean").item()
        val_loss, val_acc, n = evaluate(accelerator, ema, val_loader)
        accelerator.print(f"epoch {epoch} train {train_loss:.4f} ema val {val_loss:.4f} acc {val_acc:.4f} (n={n})")

        if val_loss < best:
            best, bad = val_loss, 0
            if accelerator.is_main_process:
                os.makedirs(CFG["out"], exist_ok=True)
                torch.save(
                    {"model": accelerator.unwrap_model(model).state_dict(), "ema": ema.state_dict(), "epoch": epoch},
                    os.path.join(CFG["out"], "best.pt"),
                )
        else:
            bad += 1
        if bad >= CFG["patience"]:
            break

    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
