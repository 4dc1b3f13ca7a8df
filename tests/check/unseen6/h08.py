# Sequence tagging with sentences of very different lengths.
# The objective is the mean over all tokens of one optimizer step, wherever those tokens live.
from __future__ import annotations

import contextlib
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

WORDS, TAGS, IGNORE = 64, 7, -100
MICRO, ACCUM, EPOCHS = 12, 2, 3


def treebank(n: int, seed: int):
    """A tag depends on the word's class and on the class of the word before it."""
    rng = random.Random(seed)
    data = []
    for _ in range(n):
        size = min(40, 3 + int(rng.expovariate(0.12)))
        words = [rng.randrange(1, WORDS) for _ in range(size)]
        tags = [(w % TAGS + (words[i - 1] % 3 if i else 0)) % TAGS for i, w in enumerate(words)]
        tags = [t if rng.random() > 0.05 else IGNORE for t in tags]  # 5 % unannotated
        data.append((torch.tensor(words), torch.tensor(tags)))
    return data


class LengthBuckets:
    """Batches of similar length. All workers draw the same plan and each takes every world-th batch of it."""

    def __init__(self, lengths, micro, rank, world, seed):
        self.lengths, self.micro, self.rank, self.world, self.seed = lengths, micro, rank, world, seed

    def plan(self, epoch):
        rng = random.Random(self.seed * 1_000_003 + epoch)
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i] + rng.uniform(-3, 3))
        batches = [order[i:i + self.micro] for i in range(0, len(order), self.micro)]
        rng.shuffle(batches)
        usable = len(batches) - len(batches) % (self.world * ACCUM)
        return batches[:usable][self.rank::self.world]


def collate(data, ids):
    words = pad_sequence([data[i][0] for i in ids], batch_first=True)
    tags = pad_sequence([data[i][1] for i in ids], batch_first=True, padding_value=IGNORE)
    return words, torch.tensor([len(data[i][0]) for i in ids]), tags


class Tagger(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.emb = nn.Embedding(WORDS, d, padding_idx=0)
        self.rnn = nn.LSTM(d, d, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(2 * d, TAGS)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.drop(self.emb(words)), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.out(self.drop(h))


@torch.no_grad()
def tag_accuracy(net, data, rank, world):
    net.eval()
    good, seen = 0, 0
    mine = list(range(rank, len(data), world))
    for i in range(0, len(mine), 50):
        words, lengths, tags = collate(data, mine[i:i + 50])
        keep = tags != IGNORE
        good += (net(words, lengths).argmax(-1)[keep] == tags[keep]).sum().item()
        seen += keep.sum().item()
    net.train()
    both = torch.tensor([good, seen], dtype=torch.float64)
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, dev = treebank(1000, 1), treebank(151, 2)
    torch.manual_seed(8)
    ddp = DistributedDataParallel(Tagger())
    net = ddp.module
    torch.manual_seed(800 + rank)
    opt = torch.optim.Adam(net.parameters(), lr=8e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.6)
    buckets = LengthBuckets([len(w) for w, _ in train], MICRO, rank, world, seed=4)

    for epoch in range(EPOCHS):
        plan = buckets.plan(epoch)
        total_nll, total_tok = torch.zeros(()), torch.zeros(())
        for first in range(0, len(plan), ACCUM):
            group = [collate(train, ids) for ids in plan[first:first + ACCUM]]
            tokens = torch.tensor(float(sum((t != IGNORE).sum().item() for _, _, t in group)))
            dist.all_reduce(tokens)
            for k, (words, lengths, tags) in enumerate(group):
                last = k == len(group) - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    nll = F.cross_entropy(
                        ddp(words, lengths).flatten(0, 1), tags.flatten(), ignore_index=IGNORE, reduction="sum")
                    (nll * world / tokens).backward()
                total_nll += nll.detach()
            total_tok += tokens
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        sched.step()
        dist.all_reduce(total_nll)
        acc = tag_accuracy(net, dev, rank, world)
        if rank == 0:
            print(f"epoch {epoch} nll/token {(total_nll / total_tok).item():.4f} dev acc {acc:.4f}", flush=True)

    if rank == 0:
        os.makedirs("out/h08", exist_ok=True)
        torch.save(net.state_dict(), "out/h08/tagger.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
