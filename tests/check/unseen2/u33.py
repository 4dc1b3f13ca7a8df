#!/usr/bin/env python
"""Siamese matcher trained with Accelerate."""
import argparse
import json
import os
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        ident = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
        a = torch.randint(0, 40, (n,), generator=g)
        same = torch.rand(n, generator=g) < 0.5
        b = torch.where(same, a, torch.randint(0, 40, (n,), generator=g))
        self.left = ident[a] + 0.4 * torch.randn(n, 16, generator=g)
        self.right = ident[b] + 0.4 * torch.randn(n, 16, generator=g)
        self.same = (a == b).float()

    def __len__(self):
        return len(self.same)

    def __getitem__(self, i):
        return {"left": self.left[i], "right": self.right[i], "same": self.same[i]}


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16))
        self.scale = nn.Parameter(torch.tensor(4.0))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, left, right):
        a, b = F.normalize(self.tower(left), dim=-1), F.normalize(self.tower(right), dim=-1)
        return self.scale * (a * b).sum(-1) + self.bias


def linear_warmup(optimizer, warmup, total):
    def fn(step):
        if step < warmup:
            return (step + 1) / max(1, warmup)
        return max(0.0, float(total - step) / max(1, total - warmup))
    return LambdaLR(optimizer, fn)


def setup(args, accelerator):
    model = Matcher()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_loader = DataLoader(Pairs(640, 1), batch_size=args.per_device_batch, shuffle=True)
    eval_loader = DataLoader(Pairs(177, 2), batch_size=32)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    total_updates = len(train_loader) * args.epochs
    scheduler = linear_warmup(optimizer, int(args.warmup_ratio * total_updates), total_updates)
    return model, optimizer, train_loader, eval_loader, accelerator.prepare(scheduler)


def validation(accelerator, model, loader):
    model.eval()
    logits, truth = [], []
    with torch.inference_mode():
        for batch in loader:
            out = model(batch["left"], batch["right"])
            o, t = accelerator.gather_for_metrics((out, batch["same"]))
            logits.append(o)
            truth.append(t)
    logits, truth = torch.cat(logits), torch.cat(truth)
    model.train()
    return {"acc": ((logits > 0).float() == truth).float().mean().item(),
            "bce": F.binary_cross_entropy_with_logits(logits, truth).item(), "n": len(truth)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--per_device_batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup_ratio", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "matcher"))
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    model, optimizer, train_loader, eval_loader, scheduler = setup(args, accelerator)
    history = []
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for batch in train_loader:
            loss = F.binary_cross_entropy_with_logits(model(batch["left"], batch["right"]), batch["same"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
        train_loss = accelerator.reduce(total / len(train_loader), reduction="mean").item()
        history.append({"epoch": epoch, "train_loss": train_loss, **validation(accelerator, model, eval_loader)})
        accelerator.print(json.dumps(history[-1]))

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs(args.out, exist_ok=True)
        torch.save(accelerator.get_state_dict(model), os.path.join(args.out, "model.pt"))
        with open(os.path.join(args.out, "history.json"), "w") as f:
            json.dump(history, f)
    accelerator.wait_for_everyone()
    time.sleep(0.5)  # let the gloo threads finish
    accelerator.end_training()


if __name__ == "__main__":
    main()
