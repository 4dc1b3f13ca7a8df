"""Intent classifier on token ids: EmbeddingBag baseline with early stopping (Accelerate)."""
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

VOCAB, LENGTH, CLASSES = 400, 24, 12


def make_split(n, seed):
    topics = torch.Generator().manual_seed(2024)
    unigram = torch.softmax(1.6 * torch.randn(CLASSES, VOCAB, generator=topics), -1)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    x = torch.multinomial(unigram[y], LENGTH, replacement=True, generator=g)
    scramble = torch.rand(n, generator=g) < 0.15
    y = torch.where(scramble, torch.randint(CLASSES, (n,), generator=g), y)
    return TensorDataset(x, y)


class BagClassifier(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.head = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, CLASSES))

    def forward(self, x):
        return self.head(self.emb(x))


class EarlyStopping:
    def __init__(self, patience, min_delta=0.0):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad = float("inf"), 0

    def update(self, value):
        """Returns True if this is a new best."""
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
            return True
        self.bad += 1
        return False

    @property
    def should_stop(self):
        return self.bad >= self.patience


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    total, batches, right, seen = 0.0, 0, 0, 0
    for x, y in loader:
        logits = model(x)
        total += F.cross_entropy(logits, y).item()
        batches += 1
        pred, ref = accelerator.gather_for_metrics((logits.argmax(-1), y))
        right += (pred == ref).sum().item()
        seen += ref.numel()
    model.train()
    return {"loss": total / batches, "acc": right / seen}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--eval_every", type=int, default=8)
    ap.add_argument("--patience", type=int, default=3)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--output_dir", default="out/intent")
    args = ap.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    best_path = os.path.join(args.output_dir, "best.pt")

    train_dl = DataLoader(make_split(2400, 1), batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_dl = DataLoader(make_split(400, 2), batch_size=50)
    test_dl = DataLoader(make_split(777, 3), batch_size=50)
    model = BagClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, train_dl, val_dl, test_dl = accelerator.prepare(model, optimizer, train_dl, val_dl, test_dl)

    stopper = EarlyStopping(args.patience)
    step, stopped = 0, False
    for epoch in range(args.epochs):
        for x, y in train_dl:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.eval_every == 0:
                m = evaluate(accelerator, model, val_dl)
                accelerator.print(f"epoch {epoch} step {step} val loss {m['loss']:.4f} acc {m['acc']:.4f}")
                if stopper.update(m["loss"]):
                    accelerator.save(accelerator.unwrap_model(model).state_dict(), best_path)
                if stopper.should_stop:
                    accelerator.set_trigger()
                if accelerator.check_trigger():
                    stopped = True
                    break
        if stopped:
            accelerator.print(f"early stop at step {step}")
            break

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).load_state_dict(torch.load(best_path))
    final = evaluate(accelerator, model, test_dl)
    accelerator.print(f"test acc {final['acc']:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
