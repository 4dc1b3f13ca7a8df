"""Prompt-masked language model fine-tuning: ragged sequences, DDP, accumulation."""
import argparse
import contextlib
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

VOCAB, IGNORE = 60, -100


class Instructions(Dataset):
    """prompt (not trained on) followed by an answer that is a shifted copy of it"""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            p = torch.randint(2, VOCAB, (int(torch.randint(3, 12, (1,), generator=g)),), generator=g)
            k = int(torch.randint(1, 4, (1,), generator=g))
            answer = ((p.repeat(k) - 2 + 5) % (VOCAB - 2)) + 2
            ids = torch.cat([p, torch.tensor([1]), answer])
            labels = ids.clone()
            labels[: len(p) + 1] = IGNORE
            self.rows.append((ids[:-1], labels[1:]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    ids = pad_sequence([r[0] for r in rows], batch_first=True)
    labels = pad_sequence([r[1] for r in rows], batch_first=True, padding_value=IGNORE)
    return ids, labels


class GRULM(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, 128, batch_first=True)
        self.out = nn.Linear(128, VOCAB)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def windows(iterable, size):
    it = iter(iterable)
    while chunk := list(itertools.islice(it, size)):
        yield chunk


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def perplexity(net, loader):
    net.eval()
    s = torch.zeros(2, dtype=torch.float64)
    for ids, labels in loader:
        s[0] += token_loss(net(ids), labels)
        s[1] += (labels != IGNORE).sum()
    dist.all_reduce(s)
    net.train()
    return torch.exp(s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--accum", type=int, default=3)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--seed", type=int, default=2)
    ap.add_argument("--out", default="./out/a13")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, val_set = Instructions(650, seed=1), Instructions(151, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, collate_fn=collate)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), 32, collate_fn=collate)

    model = DDP(GRULM())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    updates = args.epochs * -(-len(loader) // args.accum)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=updates)

    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2, dtype=torch.float64)
        for chunk in windows(loader, args.accum):
            n_tokens = torch.tensor(float(sum((labels != IGNORE).sum() for _, labels in chunk)))
            local_tokens = n_tokens.item()
            dist.all_reduce(n_tokens)
            for j, (ids, labels) in enumerate(chunk):
                last = j + 1 == len(chunk)
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = token_loss(model(ids), labels)
                    (loss * world / n_tokens).backward()
                seen[0] += loss.detach()
            seen[1] += local_tokens
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
        dist.all_reduce(seen)
        ppl = perplexity(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch} train nll/token {(seen[0] / seen[1]).item():.4f} val ppl {ppl:.3f}", flush=True)
            if ppl < best:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": model.module.state_dict(), "ppl": ppl}, os.path.join(args.out, "best.pt"))
        best = min(best, ppl)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
