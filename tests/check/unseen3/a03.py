"""Bag-of-words intent classifier, data-parallel."""
import argparse
import json
import logging
import os
import random
import tempfile
import zlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger("intent")

WORDS = {
    "billing": "invoice charge card refund price pay",
    "travel": "flight hotel train booking seat gate",
    "weather": "rain sun wind cold forecast cloud",
    "music": "song play album volume band radio",
    "health": "doctor pain sleep pill fever visit",
    "food": "pizza menu table order dinner taste",
}
FILLER = "please could you me the a now today i want to know about my".split()
BUCKETS = 512


def write_corpus(n, seed):
    rng = random.Random(seed)
    names = sorted(WORDS)
    rows = []
    for _ in range(n):
        label = rng.choice(names)
        words = rng.choices(WORDS[label].split(), k=2) + rng.choices(FILLER, k=6)
        rng.shuffle(words)
        rows.append({"text": " ".join(words), "label": label})
    return rows


class Shard:
    """The rows of one process, encoded once."""

    def __init__(self, rows, rank, world, max_len=10, label2id=None, even=True):
        rows_here = rows[rank::world]
        if even:
            rows_here = rows_here[: len(rows) // world]
        if label2id is None:
            label2id = {}
            for row in rows_here:
                label2id.setdefault(row["label"], len(label2id))
        self.label2id = label2id
        self.x = torch.zeros(len(rows_here), max_len, dtype=torch.long)
        self.y = torch.zeros(len(rows_here), dtype=torch.long)
        for i, row in enumerate(rows_here):
            ids = [1 + zlib.crc32(w.encode()) % (BUCKETS - 1) for w in row["text"].split()][:max_len]
            self.x[i, : len(ids)] = torch.tensor(ids)
            self.y[i] = label2id[row["label"]]

    def batches(self, size, generator=None):
        order = torch.arange(len(self.y))
        if generator is not None:
            order = torch.randperm(len(self.y), generator=generator)
        for part in order.split(size):
            yield self.x[part], self.y[part]


class BagClassifier(nn.Module):
    def __init__(self, n_labels):
        super().__init__()
        self.emb = nn.EmbeddingBag(BUCKETS, 32, mode="mean", padding_idx=0)
        self.out = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, n_labels))

    def forward(self, x):
        return self.out(self.emb(x))


@torch.no_grad()
def evaluate(model, shard, device):
    model.eval()
    stat = torch.zeros(3, dtype=torch.double, device=device)
    for x, y in shard.batches(64):
        x, y = x.to(device), y.to(device)
        logits = model(x)
        stat[0] += F.cross_entropy(logits, y, reduction="sum")
        stat[1] += (logits.argmax(1) == y).sum()
        stat[2] += len(y)
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(args.seed)

    train = Shard(write_corpus(1280, seed=3), rank, world)
    val = Shard(write_corpus(301, seed=4), rank, world, label2id=train.label2id, even=False)
    log.info("%d rows per process, %d labels", len(train.y), len(train.label2id))

    ddp = DDP(BagClassifier(len(train.label2id)).to(device), device_ids=[local] if cuda else None)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        g = torch.Generator().manual_seed(args.seed + 1000 * epoch + rank)
        for x, y in train.batches(args.batch_size, g):
            loss = F.cross_entropy(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val_loss, val_acc = evaluate(ddp.module, val, device)
        log.info("epoch %d train %.3f val %.3f acc %.3f", epoch, loss.item(), val_loss, val_acc)

    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="intent_")
        os.makedirs(out, exist_ok=True)
        torch.save(ddp.module.state_dict(), os.path.join(out, "model.pt"))
        with open(os.path.join(out, "labels.json"), "w") as f:
            json.dump(train.label2id, f)
        log.info("saved %s", out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
