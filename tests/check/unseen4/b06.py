"""Character-level GRU LM on generated 'log lines' of very different length, gradient accumulation, DDP."""
import argparse
import contextlib
import math
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

PAD, BOS, EOS = 0, 1, 2
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 =:"
STOI = {c: i + 3 for i, c in enumerate(ALPHABET)}


def generate_lines(n, seed):
    rng = random.Random(seed)
    words = ["".join(rng.choice(ALPHABET[:26]) for _ in range(rng.randint(2, 7))) for _ in range(40)]
    rng.seed(seed + 1)
    lines = []
    for _ in range(n):
        parts = [rng.choice(words) for _ in range(1 + int(rng.expovariate(0.25)))]
        parts += [f"{rng.choice(words)}={rng.randint(0, 99)}" for _ in range(rng.randint(0, 2))]
        lines.append([BOS] + [STOI[c] for c in " ".join(parts)[:120]] + [EOS])
    return lines


class BucketBatches:
    """Batches of similar length; the shuffled list of batches is dealt out to the ranks."""

    def __init__(self, lengths, batch_size, rank, world, seed):
        self.lengths, self.bs, self.rank, self.world, self.seed = lengths, batch_size, rank, world, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return (len(self.lengths) // self.bs) // self.world

    def __iter__(self):
        rng = random.Random(self.seed * 1000 + self.epoch)
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i] + rng.uniform(-3, 3))
        batches = [order[i:i + self.bs] for i in range(0, len(order) - self.bs + 1, self.bs)]
        rng.shuffle(batches)
        yield from batches[:len(self) * self.world][self.rank::self.world]


def collate(rows):
    out = torch.full((len(rows), max(map(len, rows))), PAD)
    for i, r in enumerate(rows):
        out[i, :len(r)] = torch.tensor(r)
    return out


class CharLM(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(len(STOI) + 3, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, len(STOI) + 3)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def nll_sum(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD, reduction="sum")


@torch.no_grad()
def perplexity(lm, lines, rank, world, bs=64):
    lm.eval()
    mine = sorted(lines[rank::world], key=len)
    tot = torch.zeros(2, dtype=torch.float64)
    for i in range(0, len(mine), bs):
        b = collate(mine[i:i + bs])
        tot += torch.tensor([nll_sum(lm, b).item(), (b[:, 1:] != PAD).sum().item()], dtype=torch.float64)
    lm.train()
    dist.all_reduce(tot)
    return math.exp(tot[0] / tot[1])


def windows(loader, k):
    group = []
    for b in loader:
        group.append(b)
        if len(group) == k:
            yield group
            group = []
    if group:
        yield group


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    lines = generate_lines(1901, seed=4)
    train, val = lines[:1700], lines[1700:]
    batches = BucketBatches([len(l) for l in train], args.batch, rank, world, seed=9)
    loader = DataLoader(train, batch_sampler=batches, collate_fn=collate)
    lm = CharLM()
    model = DDP(lm)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        batches.set_epoch(epoch)
        for step, group in enumerate(windows(loader, args.accum)):
            n_tok = torch.tensor(float(sum((b[:, 1:] != PAD).sum() for b in group)))
            dist.all_reduce(n_tok)
            total = torch.zeros(())
            for j, b in enumerate(group):
                with contextlib.nullcontext() if j == len(group) - 1 else model.no_sync():
                    loss = nll_sum(model, b) * world / n_tok
                    loss.backward()
                total += loss.detach() / world
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            dist.all_reduce(total)
            if rank == 0 and step % 5 == 0:
                print(f"epoch {epoch} step {step} nll/token {total.item():.4f}", flush=True)
        ppl = perplexity(lm, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} val ppl {ppl:.3f}", flush=True)
            os.makedirs("out", exist_ok=True)
            torch.save(lm.state_dict(), "out/charlm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
