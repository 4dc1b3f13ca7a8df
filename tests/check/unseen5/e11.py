"""Intent classification on token sequences (bag of embeddings + attention pooling) with Accelerate."""
import argparse
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import get_linear_schedule_with_warmup

VOCAB, INTENTS, PAD = 200, 6, 0


class Utterances(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        topic = torch.Generator().manual_seed(4242)
        logits = 1.5 * torch.randn(INTENTS, VOCAB - 1, generator=topic)
        self.items = []
        for _ in range(n):
            y = int(torch.randint(0, INTENTS, (1,), generator=g))
            length = int(torch.randint(3, 12, (1,), generator=g))
            ids = 1 + torch.multinomial(logits[y].softmax(0), length, replacement=True, generator=g)
            self.items.append((ids, y))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch, max_len=12):
    ids = torch.full((len(batch), max_len), PAD)
    for row, (seq, _) in enumerate(batch):
        ids[row, : len(seq)] = seq
    return {"ids": ids, "labels": torch.tensor([y for _, y in batch])}


class AttentionPool(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.score = nn.Linear(dim, 1)
        self.out = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, INTENTS))

    def forward(self, ids):
        e = self.emb(ids)
        s = self.score(e).squeeze(-1).masked_fill(ids == PAD, float("-inf"))
        return self.out((s.softmax(1).unsqueeze(-1) * e).sum(1))


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    preds, refs = [], []
    for batch in loader:
        p, r = accelerator.gather_for_metrics((model(batch["ids"]).argmax(1), batch["labels"]))
        preds.append(p)
        refs.append(r)
    model.train()
    return (torch.cat(preds) == torch.cat(refs)).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--warmup-ratio", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=13)
    ap.add_argument("--out", default="./out/e11")
    args = ap.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    train_loader = DataLoader(Utterances(1280, 1), args.batch_size, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(Utterances(301, 2), 64, collate_fn=collate)
    model = AttentionPool()

    decay, plain = [], []
    for name, p in model.named_parameters():
        (plain if name.endswith("bias") else decay).append(p)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=args.lr
    )
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

    max_steps = args.epochs * len(train_loader)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=int(args.warmup_ratio * max_steps), num_training_steps=max_steps
    )
    scheduler = accelerator.prepare(scheduler)
    set_seed(args.seed, device_specific=True)

    history = []
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for batch in train_loader:
            loss = F.cross_entropy(model(batch["ids"]), batch["labels"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
        train_loss = accelerator.reduce(total / len(train_loader), reduction="mean").item()
        acc = evaluate(accelerator, model, val_loader)
        history.append({"epoch": epoch, "train_loss": train_loss, "val_acc": acc})
        accelerator.print(f"epoch {epoch} loss {train_loss:.4f} val_acc {acc:.4f}")

    if accelerator.is_main_process:
        os.makedirs(args.out, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.out, "model.pt"))
        with open(os.path.join(args.out, "history.json"), "w") as f:
            json.dump(history, f)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
