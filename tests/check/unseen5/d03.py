"""Sequence tagging with a small GRU, Accelerate version."""
import argparse
import math
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

VOCAB, TAGS, PAD = 60, 5, -100


class TagCorpus(Dataset):
    """Tags depend on the token and on the one before it."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(5, 20, (1,), generator=g))
            toks = torch.randint(1, VOCAB, (length,), generator=g)
            prev = torch.cat([torch.zeros(1, dtype=torch.long), toks[:-1]])
            self.items.append((toks, (toks + 2 * (prev % 2)) % TAGS))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch, max_len=20):
    toks = torch.zeros(len(batch), max_len, dtype=torch.long)
    tags = torch.full((len(batch), max_len), PAD)
    for i, (t, y) in enumerate(batch):
        toks[i, :len(t)] = t
        tags[i, :len(y)] = y
    return {"tokens": toks, "tags": tags}


class Tagger(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(2 * dim, TAGS)

    def forward(self, tokens):
        return self.out(self.drop(self.rnn(self.emb(tokens))[0]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", default="./out/d03")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(args.seed, device_specific=True)
    train_dl = DataLoader(TagCorpus(1280, seed=1), args.batch_size, shuffle=True, collate_fn=collate)
    eval_dl = DataLoader(TagCorpus(317, seed=2), 32, collate_fn=collate)

    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.epochs * len(train_dl)
    warmup = total // 10

    def factor(step):
        if step < warmup:
            return step / max(1, warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup))))

    scheduler = LambdaLR(optimizer, factor)
    model, optimizer, train_dl, eval_dl, scheduler = accelerator.prepare(
        model, optimizer, train_dl, eval_dl, scheduler)

    for epoch in range(args.epochs):
        model.train()
        for batch in train_dl:
            logits = model(batch["tokens"])
            loss_sum = nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["tags"].flatten(), ignore_index=PAD, reduction="sum")
            n = accelerator.reduce((batch["tags"] != PAD).sum().float(), reduction="sum")
            accelerator.backward(loss_sum * accelerator.num_processes / n)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct = count = sentences = 0
        for batch in eval_dl:
            with torch.no_grad():
                pred = model(batch["tokens"]).argmax(-1)
            pred, gold = accelerator.gather_for_metrics((pred, batch["tags"]))
            keep = gold != PAD
            correct += (pred[keep] == gold[keep]).sum().item()
            count += keep.sum().item()
            sentences += gold.size(0)
        accelerator.print(f"epoch {epoch}: tag accuracy {correct / count:.4f} "
                          f"({sentences} sentences), lr {scheduler.get_last_lr()[0]:.2e}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
        accelerator.save(accelerator.unwrap_model(model).state_dict(),
                         os.path.join(args.output_dir, "tagger.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
