"""Tiny character LM with Accelerate: EMA weights, per-process sampling, pooled generations."""
import argparse
import copy
import math
import os
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather_object, set_seed
from torch.utils.data import DataLoader, Dataset

ALPHABET = "abcdefgh ."


class Chars(Dataset):
    def __init__(self, n, seed, ctx=20):
        g = torch.Generator().manual_seed(seed)
        words = ["bad", "cab", "fade", "head", "beach", "egg", "hag"]
        text = []
        while len(text) < n + ctx + 1:
            w = words[int(torch.randint(0, len(words), (1,), generator=g))]
            text += [ALPHABET.index(c) for c in w + (". " if torch.rand((), generator=g) < 0.2 else " ")]
        self.ids, self.n, self.ctx = torch.tensor(text), n, ctx

    def __len__(self):
        return self.n // 4

    def __getitem__(self, i):
        return self.ids[4 * i: 4 * i + self.ctx + 1]


class CharLM(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.emb = nn.Embedding(len(ALPHABET), d)
        self.rnn = nn.LSTM(d, d, batch_first=True)
        self.out = nn.Linear(d, len(ALPHABET))

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def lm_loss(model, ids, reduction="mean"):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def ema_update(target, source, decay):
    for a, b in zip(target.parameters(), source.parameters()):
        a.lerp_(b, 1 - decay)


@torch.no_grad()
def generate(net, prompt, steps, gen):
    ids = torch.tensor([[ALPHABET.index(c) for c in prompt]])
    for _ in range(steps):
        p = F.softmax(net(ids)[:, -1] / 0.7, -1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=gen)], 1)
    return "".join(ALPHABET[i] for i in ids[0].tolist())


def perplexity(accelerator, net, loader):
    """Per-sequence losses are gathered, so that duplicates from batch padding are dropped."""
    net.eval()
    rows = []
    with torch.no_grad():
        for ids in loader:
            per = lm_loss(net, ids, "none").view(len(ids), -1).mean(1)
            rows.append(accelerator.gather_for_metrics(per))
    rows = torch.cat(rows)
    return math.exp(rows.mean().item()), len(rows)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--global_batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--decay", type=float, default=0.9)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "charlm"))
    args = ap.parse_args()

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(17)
    model = CharLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    train = DataLoader(Chars(2400, 1), batch_size=args.global_batch, shuffle=True, drop_last=True)
    val = DataLoader(Chars(404, 2), batch_size=args.global_batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))
    model, optimizer, train, val, scheduler = accelerator.prepare(model, optimizer, train, val, scheduler)
    ema = copy.deepcopy(accelerator.unwrap_model(model))

    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros(())
        for ids in train:
            loss = lm_loss(model, ids)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema_update(ema, accelerator.unwrap_model(model), args.decay)
            total += loss.detach()
        total = accelerator.reduce(total / len(train), reduction="mean")
        ppl, n = perplexity(accelerator, ema, val)
        accelerator.print(f"epoch {epoch} loss {total.item():.4f} ema ppl {ppl:.3f} on {n} sequences "
                          f"lr {scheduler.get_last_lr()[0]:.1e}")

    gen = torch.Generator().manual_seed(100 + accelerator.process_index)
    with accelerator.split_between_processes(["be", "ha", "ca", "fa", "eg"]) as prompts:
        texts = [generate(ema, p, 15, gen) for p in prompts]
    texts = gather_object(texts)
    accelerator.print(texts)
    accelerator.save_state(args.out)
    if accelerator.is_main_process:
        torch.save(ema.state_dict(), os.path.join(args.out, "ema.pt"))
    accelerator.wait_for_everyone()
    time.sleep(0.5)  # let the gloo threads finish
    accelerator.end_training()


if __name__ == "__main__":
    main()
