"""
Distil a random forest into a small MLP (digits) with Accelerate.
The student sees soft targets of the forest and the hard labels, lr = warm-up then linear decay.
"""
import argparse
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--warmup", type=float, default=0.1)
    p.add_argument("--temperature", type=float, default=2.0)
    p.add_argument("--alpha", type=float, default=0.7)
    p.add_argument("--out", default="out/f05")
    return p.parse_args()


def build_data():
    digits = load_digits()
    x_tr, x_te, y_tr, y_te = train_test_split(
        digits.data / 16.0, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    forest = RandomForestClassifier(n_estimators=40, max_depth=12, random_state=0).fit(x_tr, y_tr)
    soft = forest.predict_proba(x_tr)
    train = TensorDataset(
        torch.tensor(x_tr, dtype=torch.float32),
        torch.tensor(soft, dtype=torch.float32),
        torch.tensor(y_tr),
    )
    test = TensorDataset(torch.tensor(x_te, dtype=torch.float32), torch.tensor(y_te))
    return train, test


def student():
    return nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(96, 48), nn.ReLU(),
        nn.Linear(48, 10),
    )


def distil_loss(logits, soft, hard, temperature, alpha):
    softened = (soft.clamp_min(1e-4).log() / temperature).softmax(-1)
    kl = F.kl_div(F.log_softmax(logits / temperature, -1), softened, reduction="batchmean")
    return alpha * temperature ** 2 * kl + (1 - alpha) * F.cross_entropy(logits, hard)


def evaluate(accelerator, model, loader):
    model.eval()
    right, total = 0, 0
    for x, y in loader:
        with torch.no_grad():
            guess = model(x).argmax(-1)
        guess, y = accelerator.gather_for_metrics((guess, y))
        right += (guess == y).sum().item()
        total += len(y)
    model.train()
    return right / total


def main():
    args = parse()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    set_seed(21)

    train, test = build_data()
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=128)
    model = student()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    total_steps = args.epochs * len(train_loader)
    warm = max(1, int(args.warmup * total_steps))

    def ramp(step):
        if step < warm:
            return (step + 1) / warm
        return max(0.0, (total_steps - step) / (total_steps - warm))

    scheduler = accelerator.prepare(LambdaLR(optimizer, ramp))

    history = []
    for epoch in range(args.epochs):
        running = 0.0
        for x, soft, hard in train_loader:
            loss = distil_loss(model(x), soft, hard, args.temperature, args.alpha)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            running += loss.detach()
        mean_loss = accelerator.reduce(running / len(train_loader), reduction="mean").item()
        accuracy = evaluate(accelerator, model, test_loader)
        history.append({"epoch": epoch, "loss": mean_loss, "accuracy": accuracy})
        accelerator.print(f"epoch {epoch}  loss {mean_loss:.4f}  accuracy {accuracy:.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs(args.out, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.out, "student.pt"))
        with open(os.path.join(args.out, "history.json"), "w") as f:
            json.dump(history, f, indent=1)
    accelerator.end_training()


if __name__ == "__main__":
    main()
