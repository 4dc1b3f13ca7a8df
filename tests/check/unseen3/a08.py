"""Regression with Accelerate, gradient accumulation and a step-wise schedule."""
import argparse
import json
import math
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader, Dataset


class Friedman(Dataset):
    def __init__(self, n, seed, noise=0.3):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 10, generator=g)
        x = self.x
        y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        self.y = (y + noise * torch.randn(n, generator=g) - 14.4) / 4.9

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


class Regressor(nn.Module):
    def __init__(self, width=64, dropout=0.05):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, width), nn.SiLU(), nn.Dropout(dropout),
                                 nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    preds, targets = [], []
    for batch in loader:
        pred, y = accelerator.gather_for_metrics((model(batch["x"]), batch["y"]))
        preds.append(pred)
        targets.append(y)
    model.train()
    pred, y = torch.cat(preds), torch.cat(targets)
    return {"n": len(y), "rmse": F.mse_loss(pred, y).sqrt().item(), "r2": (1 - F.mse_loss(pred, y) / y.var(correction=0)).item()}


def shared_folder(path, prefix, accelerator):
    box = [path]
    if accelerator.is_main_process and path is None:
        box = [tempfile.mkdtemp(prefix=prefix)]
    return broadcast_object_list(box)[0]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=9)
    p.add_argument("--resume", default=None)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accum, cpu=not torch.cuda.is_available())
    set_seed(args.seed)
    out = shared_folder(args.out, "friedman_", accelerator)

    train_loader = DataLoader(Friedman(1024, seed=1), batch_size=args.batch_size, shuffle=True,
                              generator=torch.Generator().manual_seed(args.seed))
    val_loader = DataLoader(Friedman(203, seed=2), batch_size=32)
    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

    total = args.epochs * math.ceil(len(train_loader) / args.accum)

    def factor(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - args.warmup) / max(1, total - args.warmup))))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, factor)
    accelerator.register_for_checkpointing(scheduler)

    first_epoch = 0
    if args.resume:
        accelerator.load_state(args.resume)
        with open(os.path.join(args.resume, "progress.json")) as f:
            first_epoch = json.load(f)["epoch"] + 1
    else:
        set_seed(args.seed, device_specific=True)

    for epoch in range(first_epoch, args.epochs):
        train_loader.set_epoch(epoch)
        losses = []
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(batch["x"]), batch["y"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        train_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
        metrics = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch} train {train_loss:.4f} val {metrics} lr {scheduler.get_last_lr()[0]:.2e}")

        folder = os.path.join(out, f"epoch_{epoch}")
        accelerator.save_state(folder)
        if accelerator.is_main_process:
            with open(os.path.join(folder, "progress.json"), "w") as f:
                json.dump({"epoch": epoch, **metrics}, f)
        accelerator.wait_for_everyone()

    accelerator.print("checkpoints in", out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
