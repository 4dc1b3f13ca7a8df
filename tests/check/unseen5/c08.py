"""Intent classification for a help-desk bot (bag of embeddings baseline)."""
import json
import os
import random
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

INTENTS = {
    "refund": "money back return refund charge card wrong order",
    "delivery": "where parcel late tracking courier order arrive",
    "login": "password reset account locked sign code email",
    "invoice": "bill pdf invoice tax company address charge",
    "cancel": "stop subscription cancel plan end renew month",
    "technical": "app crash error screen update install slow",
    "upgrade": "plan premium upgrade price feature month more",
    "complaint": "bad rude service manager unhappy wait slow",
}
FILLER = "i you the my please can help with is a to hi hello thanks need want today still again".split()


def make_corpus(n, seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        intent = rng.choice(list(INTENTS))
        words = rng.choices(INTENTS[intent].split(), k=rng.randint(2, 3)) + rng.choices(FILLER, k=rng.randint(3, 9))
        rng.shuffle(words)
        rows.append({"text": " ".join(words), "intent": intent})
    return rows


class IntentDataset(Dataset):
    def __init__(self, rows, vocab, label2id):
        self.items = [
            (torch.tensor([vocab.get(w, 1) for w in r["text"].split()]), label2id[r["intent"]]) for r in rows
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    ids = nn.utils.rnn.pad_sequence([b[0] for b in batch], batch_first=True)
    return ids, torch.tensor([b[1] for b in batch])


class Classifier(nn.Module):
    def __init__(self, n_vocab, n_labels, dim=32):
        super().__init__()
        self.emb = nn.EmbeddingBag(n_vocab, dim, mode="mean", padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, n_labels))

    def forward(self, ids):
        return self.mlp(self.emb(ids))


def evaluate(model, loader):
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for ids, y in loader:
            right[0] += (model(ids).argmax(-1) == y).sum()
            right[1] += len(y)
    dist.all_reduce(right)
    model.train()
    return (right[0] / right[1]).item()


def main():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)

    train_rows, dev_rows = make_corpus(1280, seed=1), make_corpus(320, seed=2)
    counts = Counter(w for r in train_rows for w in r["text"].split())
    vocab = {w: i + 2 for i, (w, c) in enumerate(counts.most_common()) if c >= 3}
    labels = list({r["intent"] for r in train_rows})
    label2id = {name: i for i, name in enumerate(labels)}

    train_ds = IntentDataset(train_rows, vocab, label2id)
    dev_ds = IntentDataset(dev_rows, vocab, label2id)
    sampler = DistributedSampler(train_ds, shuffle=True, seed=1337)
    train_dl = DataLoader(train_ds, batch_size=32, sampler=sampler, collate_fn=collate)
    dev_dl = DataLoader(dev_ds, batch_size=64, sampler=DistributedSampler(dev_ds, shuffle=False), collate_fn=collate)

    model = DistributedDataParallel(Classifier(len(vocab) + 2, len(labels)))
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for ids, y in train_dl:
            loss = criterion(model(ids), y)
            optim.zero_grad()
            loss.backward()
            optim.step()
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        acc = evaluate(model, dev_dl)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(train_dl) / dist.get_world_size():.4f} dev acc {acc:.4f}")

    if rank == 0:
        os.makedirs("out/c08", exist_ok=True)
        torch.save(model.module.state_dict(), "out/c08/model.pt")
        with open("out/c08/config.json", "w") as f:
            json.dump({"vocab": vocab, "labels": labels}, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
