"""Variable-length tagging with Accelerate and per-token loss over accumulation windows."""
import argparse
import os
import tempfile
from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD = -100


class TagDataset(Dataset):
    def __init__(self, n, seed, vocab=40, tags=6):
        g = torch.Generator().manual_seed(seed)
        table = torch.randint(0, tags, (vocab,), generator=torch.Generator().manual_seed(0))
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(3, 40, (1,), generator=g))
            ids = torch.randint(1, vocab, (length,), generator=g)
            self.rows.append((ids, (table[ids] + table[ids.roll(1)]) % tags))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    width = 40
    ids = pad_sequence([r[0] for r in rows], batch_first=True)
    tags = pad_sequence([r[1] for r in rows], batch_first=True, padding_value=PAD)
    extra = width - ids.size(1)
    return {"ids": F.pad(ids, (0, extra)), "tags": F.pad(tags, (0, extra), value=PAD)}


class Tagger(nn.Module):
    def __init__(self, vocab=40, d=48, tags=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, tags)

    def forward(self, ids):
        h = self.emb(ids)
        h = h + F.gelu(self.conv(h.transpose(1, 2)).transpose(1, 2))
        return self.out(self.norm(h))


def windows(loader, size):
    buf = []
    for batch in loader:
        buf.append(batch)
        if len(buf) == size:
            yield buf
            buf = []
    if buf:
        yield buf


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    right, seen = 0, 0
    for batch in loader:
        pred = model(batch["ids"]).argmax(-1)
        mask = batch["tags"] != PAD
        hit = ((pred == batch["tags"]) & mask).sum(1)
        hit, cnt = accelerator.gather_for_metrics((hit, mask.sum(1)))
        right += hit.sum().item()
        seen += cnt.sum().item()
    model.train()
    return right / seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(args.seed)
    train_loader = DataLoader(TagDataset(768, 1), batch_size=args.batch_size, shuffle=True,
                              collate_fn=collate, drop_last=True)
    val_loader = DataLoader(TagDataset(150, 2), batch_size=32, collate_fn=collate)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader)

    step = 0
    for epoch in range(args.epochs):
        for group in windows(train_loader, args.accum):
            n_local = sum((b["tags"] != PAD).sum() for b in group)
            n_items = accelerator.reduce(n_local, reduction="sum")
            window_loss = torch.zeros((), device=accelerator.device)
            for i, batch in enumerate(group):
                last = i == len(group) - 1
                with nullcontext() if last else accelerator.no_sync(model):
                    logits = model(batch["ids"])
                    loss = F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten(),
                                           ignore_index=PAD, reduction="sum")
                    loss = loss / n_items
                    accelerator.backward(loss)
                window_loss += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                shown = accelerator.reduce(window_loss, reduction="sum").item()
                accelerator.print(f"step {step} loss/token {shown:.4f}")
        acc = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch} token accuracy {acc:.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        out = args.out or tempfile.mkdtemp(prefix="tagger_")
        os.makedirs(out, exist_ok=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(out, "model.pt"))
        print("saved to", out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
