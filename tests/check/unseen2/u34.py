"""Intent classifier for short utterances."""
import argparse
import collections
import json
import os
import random
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TEMPLATES = {
    "greet": ["hello there", "hi friend", "good morning"],
    "weather": ["will it rain today", "forecast for tomorrow", "is it sunny outside"],
    "music": ["play some jazz", "put on a song", "next track please"],
    "alarm": ["wake me at seven", "set an alarm", "remind me tomorrow"],
    "travel": ["book a flight", "train to the city", "find me a hotel"],
    "bye": ["see you later", "good night", "bye friend"],
}
FILLERS = ["please", "now", "um", "well", "thanks", "ok"]


def corpus(n, seed):
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        intent = rng.choice(sorted(TEMPLATES))
        words = rng.choice(TEMPLATES[intent]).split()
        for _ in range(rng.randint(0, 3)):
            words.insert(rng.randint(0, len(words)), rng.choice(FILLERS))
        out.append({"text": " ".join(words), "intent": intent})
    return out


class Featurizer:
    """Word vocabulary by frequency plus the label inventory."""

    def __init__(self, records, min_count=1):
        freq = collections.Counter(w for r in records for w in r["text"].split())
        kept = sorted((w for w, c in freq.items() if c >= min_count), key=lambda w: (-freq[w], w))
        self.words = {w: i + 1 for i, w in enumerate(kept)}
        self.intents = {name: i for i, name in enumerate({r["intent"] for r in records})}

    def encode(self, r):
        return torch.tensor([self.words.get(w, 0) for w in r["text"].split()]), self.intents[r["intent"]]


class Utterances(Dataset):
    def __init__(self, records, feat):
        self.items = [feat.encode(r) for r in records]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    ids = torch.cat([i for i, _ in items])
    lens = torch.tensor([0] + [len(i) for i, _ in items[:-1]])
    return ids, lens.cumsum(0), torch.tensor([y for _, y in items])


class IntentNet(nn.Module):
    def __init__(self, vocab, classes, dim=24):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.out = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, ids, offsets):
        return self.out(self.bag(ids, offsets))


def accuracy(model, loader):
    model.eval()
    s = torch.zeros(2)
    with torch.no_grad():
        for ids, off, y in loader:
            s += torch.tensor([(model(ids, off).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(s)
    model.train()
    return (s[0] / s[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "intent_model"))
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)

    train_rec, val_rec = corpus(600, 1), corpus(150, 2)
    feat = Featurizer(train_rec)
    train, val = Utterances(train_rec, feat), Utterances(val_rec, feat)
    sampler = DistributedSampler(train, world, rank, shuffle=True)
    loader = DataLoader(train, a.batch, sampler=sampler, collate_fn=collate)
    val_loader = DataLoader(val, 25, sampler=DistributedSampler(val, world, rank, shuffle=False), collate_fn=collate)

    model = DistributedDataParallel(IntentNet(len(feat.words) + 1, len(feat.intents)))
    opt = torch.optim.Adam(model.parameters(), lr=a.lr)
    crit = nn.CrossEntropyLoss()
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        tot = torch.zeros(2)
        for ids, off, y in loader:
            opt.zero_grad()
            loss = crit(model(ids, off), y)
            loss.backward()
            opt.step()
            tot += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(tot)
        acc = accuracy(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {tot[0] / tot[1]:.4f} val acc {acc:.3f}", flush=True)

    if rank == 0:
        os.makedirs(a.out, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(a.out, "model.pt"))
        with open(os.path.join(a.out, "labels.json"), "w") as f:
            json.dump({"words": feat.words, "intents": feat.intents}, f)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
