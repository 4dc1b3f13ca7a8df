"""Digits ConvNet baseline (Accelerate). Keeps the best checkpoint on a held-out part, reports the test part."""
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, Subset, random_split

logger = get_logger(__name__)


class Digits(Dataset):
    def __init__(self):
        d = load_digits()
        self.x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
        self.y = torch.tensor(d.target)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Augmented(Dataset):
    """Random one-pixel shifts, cutout and sensor noise."""

    def __init__(self, base):
        self.base = base

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        x, y = self.base[i]
        dy, dx, cy, cx = torch.randint(0, 6, (4,)).tolist()
        x = torch.roll(x, (dy % 3 - 1, dx % 3 - 1), (1, 2)).clone()
        x[:, cy:cy + 2, cx:cx + 2] = 0
        return x + 0.1 * torch.randn_like(x), y


class ConvNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(2 * width * 16, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def get_dataloaders(args):
    digits = Digits()
    test = Subset(digits, range(1500, len(digits)))
    train, val = random_split(Subset(digits, range(1500)), [1200, 300])
    return (DataLoader(Augmented(train), batch_size=args.batch_size, shuffle=True, drop_last=True),
            DataLoader(val, batch_size=64), DataLoader(test, batch_size=64))


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    hits = []
    for x, y in loader:
        pred, ref = accelerator.gather_for_metrics((model(x).argmax(-1), y))
        hits.append((pred == ref).float())
    model.train()
    return torch.cat(hits).mean().item()


def parse_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--warmup", type=int, default=5)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--output_dir", default="out/convnet")
    return ap.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True)
    # a different stream of augmentations in every process
    set_seed(args.seed, device_specific=True)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)

    train_dl, val_dl, test_dl = get_dataloaders(args)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    model, optimizer, train_dl, val_dl, test_dl = accelerator.prepare(model, optimizer, train_dl, val_dl, test_dl)
    total = args.epochs * len(train_dl)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / args.warmup, 1.0) * max(0.0, 1 - s / total))

    best, path = -1.0, os.path.join(args.output_dir, "best.pt")
    for epoch in range(args.epochs):
        running = torch.zeros(())
        for x, y in train_dl:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            running += loss.detach()
        train_loss = accelerator.reduce(running / len(train_dl), reduction="mean").item()
        acc = evaluate(accelerator, model, val_dl)
        accelerator.print(f"epoch {epoch} train loss {train_loss:.4f} val acc {acc:.4f}")
        if acc > best:
            best = acc
            accelerator.save(accelerator.unwrap_model(model).state_dict(), path)

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).load_state_dict(torch.load(path))
    accelerator.print(f"best val acc {best:.4f}, test acc {evaluate(accelerator, model, test_dl):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
