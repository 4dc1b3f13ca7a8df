"""Noisy-student style training on digits with Accelerate."""
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class ConvNet(nn.Module):
    def __init__(self, width=16, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())
        self.body = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * width), nn.SiLU()
        )
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, x):
        h = self.body(self.stem(x)).mean(dim=(2, 3))
        return self.head(self.drop(h))


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--val_fraction", type=float, default=0.2)
    ap.add_argument("--sigma", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=42)
    ap.add_argument("--output_dir", default="./out/a02")
    return ap.parse_args()


def get_dataset():
    images, target = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0
    return TensorDataset(images, torch.tensor(target))


def get_loaders(args):
    dataset = get_dataset()
    n_val = int(len(dataset) * args.val_fraction)
    train_set, val_set = random_split(dataset, [len(dataset) - n_val, n_val])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=2 * args.batch_size)
    return train_loader, val_loader


def perturb(x, sigma):
    x = x + sigma * torch.randn_like(x)
    if torch.rand(()) < 0.5:
        dx, dy = torch.randint(-1, 2, (2,)).tolist()
        x = torch.roll(x, (dx, dy), dims=(2, 3))
    return x


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    hits, total, nll = 0, 0, 0.0
    for x, y in loader:
        logits = model(x)
        logits, y = accelerator.gather_for_metrics((logits, y))
        hits += (logits.argmax(-1) == y).sum().item()
        nll += F.cross_entropy(logits, y, reduction="sum").item()
        total += y.numel()
    model.train()
    return hits / total, nll / total


def main():
    args = parse()
    accelerator = Accelerator(cpu=True)
    # every process perturbs its images in its own way
    set_seed(args.seed, device_specific=True)

    train_loader, val_loader = get_loaders(args)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )

    best = 0.0
    for epoch in range(args.epochs):
        running = torch.zeros((), device=accelerator.device)
        for x, y in train_loader:
            loss = F.cross_entropy(model(perturb(x, args.sigma)), y, label_smoothing=0.05)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            running += loss.detach()
        train_loss = accelerator.reduce(running / len(train_loader), reduction="mean").item()
        acc, nll = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: train {train_loss:.4f} val acc {acc:.4f} nll {nll:.4f}")
        if acc > best:
            best = acc
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                os.makedirs(args.output_dir, exist_ok=True)
                state = accelerator.unwrap_model(model).state_dict()
                torch.save({"state": state, "acc": acc, "epoch": epoch}, os.path.join(args.output_dir, "best.pt"))
    accelerator.print(f"best val acc {best:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
