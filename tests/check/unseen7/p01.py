"""Frame-wise phone tagger (BiGRU) on ragged synthetic utterances.

torchrun --nproc_per_node 2 p01.py
"""
import json
import os
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

N_MELS, N_PHONES = 20, 12
ACCUM = 2
EPOCHS = 3
OUT = "out/p01"


class Utterances(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(N_PHONES, N_MELS, generator=torch.Generator().manual_seed(99))
        self.items = []
        for _ in range(n):
            segs = int(torch.randint(2, 9, (1,), generator=g))
            labels = []
            for ph in torch.randint(0, N_PHONES, (segs,), generator=g).tolist():
                labels += [ph] * int(torch.randint(2, 7, (1,), generator=g))
            y = torch.tensor(labels)
            x = proto[y] + 1.2 * torch.randn(len(y), N_MELS, generator=g)
            self.items.append((x, y))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    xs, ys = zip(*batch)
    return pad_sequence(xs, batch_first=True), pad_sequence(ys, batch_first=True, padding_value=-100)


class Tagger(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(N_MELS, hidden), nn.ReLU(), nn.Dropout(0.1))
        self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, N_PHONES)

    def forward(self, x):
        h, _ = self.rnn(self.inp(x))
        return self.out(h)


def windows(loader, k):
    it = iter(loader)
    while chunk := list(islice(it, k)):
        yield chunk


@torch.no_grad()
def frame_error(net, data, rank, world):
    net.eval()
    tally = torch.zeros(2, dtype=torch.float64)
    mine = list(range(rank, len(data), world))
    for lo in range(0, len(mine), 16):
        x, y = collate([data[i] for i in mine[lo:lo + 16]])
        keep = y != -100
        wrong = (net(x).argmax(-1) != y) & keep
        tally += torch.tensor([wrong.sum().item(), keep.sum().item()], dtype=torch.float64)
    dist.all_reduce(tally)
    net.train()
    return (tally[0] / tally[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    net = DDP(Tagger())
    torch.manual_seed(1000 + rank)  # dropout stream

    train, dev = Utterances(403, seed=1), Utterances(61, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=8, sampler=sampler, collate_fn=collate)
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)

    history = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        nll_sum = torch.zeros(2, dtype=torch.float64)
        for chunk in windows(loader, ACCUM):
            frames = torch.tensor(float(sum((y != -100).sum().item() for _, y in chunk)))
            total = frames.clone()
            dist.all_reduce(total)
            for j, (x, y) in enumerate(chunk):
                final = j == len(chunk) - 1
                with nullcontext() if final else net.no_sync():
                    logits = net(x)
                    nll = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
                    (nll * world / total).backward()
                nll_sum[0] += nll.item()
            nll_sum[1] += frames.item()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
        dist.all_reduce(nll_sum)
        fer = frame_error(net.module, dev, rank, world)
        history.append({"epoch": epoch, "nll": (nll_sum[0] / nll_sum[1]).item(), "dev_fer": fer})
        if rank == 0:
            print(history[-1], flush=True)

    if rank == 0:
        os.makedirs(OUT, exist_ok=True)
        torch.save(net.module.state_dict(), f"{OUT}/tagger.pt")
        with open(f"{OUT}/history.json", "w") as f:
            json.dump(history, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
