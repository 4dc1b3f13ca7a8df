"""Streams text lines from disk, predicts the next character with a GRU."""
import argparse
import datetime
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

VOCAB = "abcdefghijklmnopqrstuvwxyz "
WORDS = "the cat dog house runs over under lazy quick brown fox jumps and sleeps".split()


def make_corpus(n, seed):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=8))[:32].ljust(32) for _ in range(n)]


class LineStream(IterableDataset):
    def __init__(self, lines, seed=0):
        self.lines = lines
        self.seed = seed
        self.epoch = 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(len(self.lines)))
        random.Random(self.seed + self.epoch).shuffle(order)
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        for i in order[self.rank * workers + worker :: self.world_size * workers]:
            yield torch.tensor([VOCAB.index(c) for c in self.lines[i]])


class CharGRU(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(len(VOCAB), dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, len(VOCAB))

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def nll(logits, target, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=datetime.timedelta(minutes=3))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(11)

    stream = LineStream(make_corpus(640, seed=1), seed=5)
    loader = DataLoader(stream, batch_size=args.batch_size // world, num_workers=args.workers, pin_memory=on_gpu)
    held_out = torch.tensor([[VOCAB.index(c) for c in line] for line in make_corpus(65, seed=2)])[rank::world].to(device)

    model = DDP(CharGRU().to(device), gradient_as_bucket_view=True)
    optim = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        model.train()
        for batch in loader:
            batch = batch.to(device)
            optim.zero_grad()
            nll(model(batch[:, :-1]), batch[:, 1:]).backward()
            optim.step()
        model.eval()
        with torch.no_grad():
            local = nll(model.module(held_out[:, :-1]), held_out[:, 1:], "sum")
        total = torch.stack([local, torch.tensor(float(held_out[:, 1:].numel()), device=device)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} held-out nll/char {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
