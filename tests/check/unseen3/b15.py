"""Accelerate training loop with warmup schedule, save_state / --resume."""
import argparse
import json
import math
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list, set_seed
from torch.utils.data import DataLoader, TensorDataset


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = 1.0 + y.float() + 0.25 * torch.randn(n, generator=g)
    a = 2 * math.pi * torch.rand(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1), y)


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.05),
                                  nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.body(x))


class Progress:
    def __init__(self):
        self.epoch, self.updates, self.best = 0, 0, 0.0

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, sd):
        self.__dict__.update(sd)


def parameter_groups(model, wd):
    decay, plain = [], []
    for name, p in model.named_parameters():
        (plain if p.ndim == 1 else decay).append(p)
    return [{"params": decay, "weight_decay": wd}, {"params": plain, "weight_decay": 0.0}]


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    preds, labels = [], []
    for x, y in loader:
        p, t = accelerator.gather_for_metrics((model(x).argmax(1), y))
        preds.append(p)
        labels.append(t)
    model.train()
    preds, labels = torch.cat(preds), torch.cat(labels)
    return (preds == labels).float().mean().item(), len(labels)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--accum", type=int, default=3)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--warmup", type=int, default=10)
    ap.add_argument("--seed", type=int, default=2)
    ap.add_argument("--resume", default=None)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.accum,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    set_seed(args.seed)
    model = Net()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.02), lr=args.lr)
    train_loader = DataLoader(rings(1152, 1), batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(rings(277, 2), batch_size=50)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader)
    set_seed(args.seed, device_specific=True)

    updates_per_epoch = math.ceil(len(train_loader) / args.accum)
    total = updates_per_epoch * args.epochs

    def shape(u):
        if u < args.warmup:
            return (u + 1) / args.warmup
        return max(0.0, (total - u) / (total - args.warmup))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, shape)
    progress = Progress()
    accelerator.register_for_checkpointing(scheduler, progress)

    out = [(args.out or tempfile.mkdtemp(prefix="rings_")) if accelerator.is_main_process else None]
    out = broadcast_object_list(out)[0]
    if args.resume:
        accelerator.load_state(args.resume)
        accelerator.print(f"resumed at epoch {progress.epoch}")

    for epoch in range(progress.epoch, args.epochs):
        train_loader.set_epoch(epoch)
        total_loss, seen = torch.zeros((), device=accelerator.device), 0
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
                    progress.updates += 1
            total_loss += loss.detach()
            seen += 1
        train_loss = accelerator.reduce(total_loss, reduction="mean").item() / seen
        acc, n = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch} loss {train_loss:.4f} acc {acc:.4f} ({n} rows) "
                          f"updates {progress.updates}/{total} lr {scheduler.get_last_lr()[0]:.2e}")
        progress.epoch = epoch + 1
        improved = acc > progress.best
        progress.best = max(progress.best, acc)
        accelerator.save_state(os.path.join(out, f"epoch_{epoch}"))
        if improved and accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(out, "best.pt"))
            with open(os.path.join(out, "best.json"), "w") as f:
                json.dump({"epoch": epoch, "acc": acc}, f)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
