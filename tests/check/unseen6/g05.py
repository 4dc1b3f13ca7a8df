"""Explicit-feedback recommender (factors + small MLP) with Accelerate."""
import json
import math
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split

CFG = dict(users=300, items=200, ratings=4096, dim=16, batch_size=64, epochs=4, lr=1e-2, warmup_ratio=0.1, seed=31)


def synthetic_ratings(cfg):
    g = torch.Generator().manual_seed(cfg["seed"])
    u_lat = torch.randn(cfg["users"], 4, generator=g)
    i_lat = torch.randn(cfg["items"], 4, generator=g)
    bias = 0.5 * torch.randn(cfg["items"], generator=g)
    users = torch.randint(cfg["users"], (cfg["ratings"],), generator=g)
    items = torch.randint(cfg["items"], (cfg["ratings"],), generator=g)
    score = 3 + 0.6 * (u_lat[users] * i_lat[items]).sum(-1) + bias[items]
    score = (score + 0.2 * torch.randn(len(score), generator=g)).clamp(1, 5)
    return TensorDataset(users, items, score)


class NeuralMF(nn.Module):
    def __init__(self, users, items, dim):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.item_bias = nn.Embedding(items, 1)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.3)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, u, i):
        p, q = self.user(u), self.item(i)
        deep = self.mlp(torch.cat([p, q], -1)).squeeze(-1)
        return 3.0 + (p * q).sum(-1) + deep + self.item_bias(i).squeeze(-1)


def warmup_linear(warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (total - step) / max(1, total - warmup))
    return factor


def rmse(accelerator, model, loader):
    model.eval()
    preds, refs = [], []
    with torch.no_grad():
        for u, i, r in loader:
            p, t = accelerator.gather_for_metrics((model(u, i), r))
            preds.append(p)
            refs.append(t)
    model.train()
    return (torch.cat(preds) - torch.cat(refs)).pow(2).mean().sqrt().item()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(CFG["seed"])
    data = synthetic_ratings(CFG)
    train_set, val_set = random_split(data, [3584, 512], generator=torch.Generator().manual_seed(1))
    train_loader = DataLoader(train_set, batch_size=CFG["batch_size"], shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=CFG["batch_size"])

    model = NeuralMF(CFG["users"], CFG["items"], CFG["dim"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG["lr"], weight_decay=0.02)

    steps_per_epoch = math.floor(len(train_set) / (CFG["batch_size"] * accelerator.num_processes))
    total_steps = steps_per_epoch * CFG["epochs"]
    scheduler = LambdaLR(optimizer, warmup_linear(int(CFG["warmup_ratio"] * total_steps), total_steps))

    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, val_loader, scheduler
    )
    accelerator.print(f"{total_steps} optimizer steps, peak lr {CFG['lr']}")

    history = []
    for epoch in range(CFG["epochs"]):
        total = torch.zeros(())
        for users, items, ratings in train_loader:
            loss = nn.functional.mse_loss(model(users, items), ratings)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
        train_mse = accelerator.reduce(total / len(train_loader), reduction="mean").item()
        history.append({"epoch": epoch, "train_mse": train_mse, "val_rmse": rmse(accelerator, model, val_loader)})
        accelerator.print(history[-1])

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs("out/g05", exist_ok=True)
        accelerator.save(accelerator.unwrap_model(model).state_dict(), "out/g05/model.pt")
        with open("out/g05/history.json", "w") as f:
            json.dump(history, f, indent=1)
    accelerator.end_training()


if __name__ == "__main__":
    main()
