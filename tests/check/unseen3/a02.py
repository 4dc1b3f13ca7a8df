import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)


def parse_args():
    p = argparse.ArgumentParser(description="Train a small classifier with Accelerate")
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--warmup-ratio", type=float, default=0.1)
    p.add_argument("--max-grad-norm", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=17)
    p.add_argument("--out", default=None)
    return p.parse_args()


def spiral(n_per_class, classes, seed):
    g = torch.Generator().manual_seed(seed)
    xs, ys = [], []
    for c in range(classes):
        t = torch.rand(n_per_class, generator=g)
        angle = 2.5 * t + 2 * torch.pi * c / classes + 0.15 * torch.randn(n_per_class, generator=g)
        r = 0.2 + t
        xs.append(torch.stack([r * torch.cos(angle), r * torch.sin(angle)], dim=1))
        ys.append(torch.full((n_per_class,), c))
    return TensorDataset(torch.cat(xs), torch.cat(ys))


def linear_with_warmup(optimizer, warmup_steps, total_steps):
    def factor(step):
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))

    return LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    correct = seen = 0
    for x, y in loader:
        pred = model(x).argmax(-1)
        pred, y = accelerator.gather_for_metrics((pred, y))
        correct += (pred == y).sum().item()
        seen += y.numel()
    model.train()
    return correct / seen


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(args.seed)

    train = spiral(320, 4, seed=1)
    val = spiral(61, 4, seed=2)
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True,
                              generator=torch.Generator().manual_seed(args.seed))
    val_loader = DataLoader(val, batch_size=32)

    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )

    total_steps = args.epochs * len(train_loader)
    scheduler = linear_with_warmup(optimizer, int(args.warmup_ratio * total_steps), total_steps)
    scheduler = accelerator.prepare(scheduler)

    accelerator.print(f"{len(train)} examples, {total_steps} optimizer steps, "
                      f"{accelerator.num_processes} processes")
    step = 0
    for epoch in range(args.epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
        mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()
        acc = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch} step {step} loss {mean_loss:.4f} val_acc {acc:.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        out = args.out or tempfile.mkdtemp(prefix="spiral_")
        os.makedirs(out, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(out, "model.pt"))
        print("saved", out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
