import argparse
import os
import random
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler


class Events(Dataset):
    """Variable-length event sequences, binary outcome."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.seqs, self.labels = [], []
        for _ in range(n):
            y = rng.random() < 0.5
            length = rng.randint(5, 25)
            self.seqs.append(torch.tensor([rng.choice([1, 2, 3, 4, 5] if y else [3, 4, 5, 6, 7]) for _ in range(length)]))
            self.labels.append(float(y))

    def __len__(self):
        return len(self.seqs)

    def __getitem__(self, i):
        return self.seqs[i], self.labels[i]


class BucketBatches(BatchSampler):
    """Sorts a pool of sampled indices by length and cuts it into batches."""

    def __init__(self, sampler, lengths, batch_size, pool=8):
        super().__init__(sampler, batch_size, drop_last=False)
        self.lengths, self.pool = lengths, pool * batch_size

    def __iter__(self):
        idx = list(self.sampler)
        for lo in range(0, len(idx), self.pool):
            chunk = sorted(idx[lo:lo + self.pool], key=self.lengths.__getitem__)
            for k in range(0, len(chunk), self.batch_size):
                yield chunk[k:k + self.batch_size]

    def __len__(self):
        return (len(self.sampler) + self.batch_size - 1) // self.batch_size


def collate(items):
    seqs, labels = zip(*items)
    return pad_sequence(seqs, batch_first=True), torch.tensor([len(s) for s in seqs]), torch.tensor(labels)


class Model(nn.Module):
    def __init__(self, vocab=8, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, 1)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.emb(ids), lengths, batch_first=True, enforce_sorted=False)
        _, h = self.rnn(packed)
        return self.out(h[-1]).squeeze(-1)


class Loop:
    def __init__(self, model, train_loader, val_loader, optimizer, rank):
        self.model, self.train_loader, self.val_loader = model, train_loader, val_loader
        self.optimizer, self.rank = optimizer, rank
        self.crit = nn.BCEWithLogitsLoss()

    def _start_epoch(self, epoch):
        for loader in (self.train_loader, self.val_loader):
            sampler = getattr(loader, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def train(self):
        self.model.train()
        total = torch.zeros(2)
        for ids, lengths, y in self.train_loader:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.crit(self.model(ids, lengths), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.optimizer.step()
            total += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total = torch.zeros(2)
        for ids, lengths, y in self.val_loader:
            total += torch.tensor([((self.model(ids, lengths) > 0).float() == y).sum().item(), len(y)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def run(self, epochs):
        for epoch in range(epochs):
            t0 = time.time()
            self._start_epoch(epoch)
            loss, acc = self.train(), self.validate()
            if self.rank == 0:
                print(f"epoch={epoch} loss={loss:.4f} acc={acc:.4f} time={time.time() - t0:.1f}s", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save", default=os.path.join(tempfile.gettempdir(), "events_gru.pt"))
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)

    train, val = Events(480, 1), Events(120, 2)
    batches = BucketBatches(DistributedSampler(train, world, rank, shuffle=True, seed=5),
                            [len(s) for s in train.seqs], args.bs)
    train_loader = DataLoader(train, batch_sampler=batches, collate_fn=collate)
    val_loader = DataLoader(val, 32, sampler=DistributedSampler(val, world, rank, shuffle=False), collate_fn=collate)
    model = DDP(Model())
    Loop(model, train_loader, val_loader, torch.optim.Adam(model.parameters(), args.lr), rank).run(args.epochs)
    if rank == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
