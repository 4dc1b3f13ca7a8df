"""Digits with Accelerate: accumulation, own LR schedule, confusion matrix at the end."""
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH, ACCUM, LR = 3, 32, 2, 6e-3


class Digits(Dataset):
    def __init__(self, x, y, train):
        self.x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.y = torch.tensor(y)
        self.train = train

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if self.train:
            x = x + 0.08 * torch.randn_like(x)
        return x, self.y[i]


class MixerNet(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.stem = nn.Conv2d(1, dim, 2, stride=2)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.chan = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = x + self.token(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.chan(self.norm2(x))
        return self.head(x.mean(1))


def evaluate(accelerator, model, loader):
    model.eval()
    confusion = torch.zeros(10, 10, dtype=torch.long)
    loss_sum = 0.0
    for x, y in loader:
        with torch.no_grad():
            logits = model(x)
        logits, y = accelerator.gather_for_metrics((logits, y))
        loss_sum += F.cross_entropy(logits, y, reduction="sum").item()
        confusion += torch.bincount(10 * y + logits.argmax(-1), minlength=100).view(10, 10)
    model.train()
    n = confusion.sum().item()
    return loss_sum / n, confusion.diag().sum().item() / n, confusion


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM)
    set_seed(77, device_specific=True)

    x, y = load_digits(return_X_y=True)
    xt, xv, yt, yv = train_test_split(x, y, train_size=1408, random_state=1, stratify=y)
    train_dl = DataLoader(Digits(xt, yt, True), batch_size=BATCH, shuffle=True)
    test_dl = DataLoader(Digits(xv, yv, False), batch_size=64)

    model = MixerNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer, train_dl, test_dl = accelerator.prepare(model, optimizer, train_dl, test_dl)

    updates = EPOCHS * math.ceil(len(train_dl) / ACCUM)
    scheduler = LambdaLR(optimizer.optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * min(1.0, s / updates))))

    done, best = 0, 0.0
    for epoch in range(EPOCHS):
        for x, y in train_dl:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
                done += 1
        test_loss, acc, confusion = evaluate(accelerator, model, test_dl)
        accelerator.print(f"epoch {epoch} updates {done}/{updates} loss {test_loss:.4f} acc {acc:.4f} n {confusion.sum()}")
        if acc > best:
            best = acc
            os.makedirs("./out/c11", exist_ok=True)
            accelerator.save(accelerator.unwrap_model(model).state_dict(), "./out/c11/best.pt")

    accelerator.wait_for_everyone()
    weights = torch.load("./out/c11/best.pt")
    accelerator.unwrap_model(model).load_state_dict(weights)
    _, acc, confusion = evaluate(accelerator, model, test_dl)
    if accelerator.is_main_process:
        print(f"best checkpoint acc {acc:.4f}")
        print(confusion)
    accelerator.end_training()


if __name__ == "__main__":
    main()
