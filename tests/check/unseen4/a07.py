"""Two-view regularised digits classifier with Accelerate, accumulation and resume."""
import argparse
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class Progress:
    def __init__(self):
        self.epoch, self.best = 0, 0.0

    def state_dict(self):
        return {"epoch": self.epoch, "best": self.best}

    def load_state_dict(self, state):
        self.epoch, self.best = state["epoch"], state["best"]


def make_model(hidden=160):
    return nn.Sequential(nn.Linear(64, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, 10))


def warmup_cosine(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        t = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.5 * (1 + math.cos(math.pi * t))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def corrupt(x, rng, p=0.15):
    mask = (torch.rand(x.shape, generator=rng) > p).to(x.dtype)
    return x * mask + 0.03 * torch.randn(x.shape, generator=rng)


def consistency(a, b):
    la, lb = a.log_softmax(-1), b.log_softmax(-1)
    return 0.5 * (F.kl_div(la, lb, log_target=True, reduction="batchmean")
                  + F.kl_div(lb, la, log_target=True, reduction="batchmean"))


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    hits = total = 0
    for x, y in loader:
        pred = model(x).argmax(-1)
        pred, y = accelerator.gather_for_metrics((pred, y))
        hits += (pred == y).sum().item()
        total += len(y)
    model.train()
    return hits / total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--alpha", type=float, default=0.5)
    ap.add_argument("--seed", type=int, default=5)
    ap.add_argument("--output_dir", default="./out/a07")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.accum,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    set_seed(args.seed)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    train_set, val_set = random_split(data, [1408, len(data) - 1408])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=64)

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)
    total = args.epochs * len(train_loader) // args.accum
    scheduler = warmup_cosine(optimizer, warmup=total // 10, total=total)

    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, val_loader, scheduler
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    ckpt_dir = os.path.join(args.output_dir, "last")
    if args.resume and os.path.isdir(ckpt_dir):
        accelerator.load_state(ckpt_dir)
        accelerator.print(f"resumed after epoch {progress.epoch}")

    while progress.epoch < args.epochs:
        epoch = progress.epoch
        train_loader.set_epoch(epoch)
        rng = torch.Generator().manual_seed(10_000 * args.seed + 100 * epoch + accelerator.process_index)
        for xb, yb in train_loader:
            with accelerator.accumulate(model):
                a, b = model(torch.cat([corrupt(xb, rng), corrupt(xb, rng)])).chunk(2)
                loss = 0.5 * (F.cross_entropy(a, yb) + F.cross_entropy(b, yb)) + args.alpha * consistency(a, b)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        acc = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch} acc {acc:.4f} |g| {norm:.3f} lr {scheduler.get_last_lr()[0]:.2e}")
        improved = acc > progress.best
        progress.best = max(progress.best, acc)
        progress.epoch = epoch + 1
        accelerator.save_state(ckpt_dir)
        if improved and accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.output_dir, "best.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
