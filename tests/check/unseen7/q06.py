"""Small causal language model on sentences of unequal length.

One optimizer step covers ACCUM micro-batches on each process, and the loss is the mean over
all the tokens of that step, wherever they were computed.
"""
import contextlib
import math
import os
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

VOCAB, PAD, BOS, EOS = 40, 0, 1, 2
MAXLEN, ACCUM, MICRO, EPOCHS = 32, 2, 8, 3


def sentences(n, seed):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        length = int(torch.randint(6, MAXLEN - 2, (1,), generator=g))
        step = int(torch.randint(1, 5, (1,), generator=g))
        start = int(torch.randint(0, VOCAB - 3, (1,), generator=g))
        jitter = (torch.rand(length, generator=g) < 0.1).long()
        body = (start + step * torch.arange(length) + jitter) % (VOCAB - 3) + 3
        out.append(torch.cat([torch.tensor([BOS]), body, torch.tensor([EOS])]))
    return out


def collate(batch):
    x = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PAD)
    return x[:, :-1], x[:, 1:]


class LM(nn.Module):
    def __init__(self, d=48, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, d)
        self.pos = nn.Embedding(MAXLEN, d)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(d)
        nn.init.normal_(self.tok.weight, std=0.02)
        nn.init.normal_(self.pos.weight, std=0.02)

    def forward(self, x):
        t = x.size(1)
        mask = torch.full((t, t), float("-inf")).triu(1)
        h = self.body(self.tok(x) + self.pos(torch.arange(t)), mask=mask)
        return F.linear(self.norm(h), self.tok.weight)


def nll(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")


@torch.no_grad()
def perplexity(net, data, rank, world):
    net.eval()
    acc = torch.zeros(2, dtype=torch.float64)
    mine = data[rank::world]
    for i in range(0, len(mine), 32):
        x, y = collate(mine[i:i + 32])
        acc += torch.tensor([nll(net, x, y).item(), (y != PAD).sum().item()], dtype=torch.float64)
    dist.all_reduce(acc)
    net.train()
    return math.exp(acc[0] / acc[1])


def groups(loader):
    it = iter(loader)
    while chunk := list(islice(it, ACCUM)):
        yield chunk


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(17)
    model = DDP(LM())
    torch.manual_seed(1800 + rank)  # dropout differs between the processes

    train, held_out = sentences(640, 0), sentences(151, 1)
    sampler = DistributedSampler(train, shuffle=True, seed=3, drop_last=True)
    loader = DataLoader(train, MICRO, sampler=sampler, collate_fn=collate)
    updates = EPOCHS * math.ceil(len(loader) / ACCUM)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=updates, pct_start=0.2)

    best = float("inf")
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2, dtype=torch.float64)
        for chunk in groups(loader):
            tokens = torch.tensor(sum((y != PAD).sum().item() for _, y in chunk), dtype=torch.float64)
            dist.all_reduce(tokens)
            for k, (x, y) in enumerate(chunk):
                last = k == len(chunk) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = nll(model, x, y)
                    # DDP divides by world
                    (loss * (world / tokens.item())).backward()
                seen += torch.tensor([loss.item(), (y != PAD).sum().item()], dtype=torch.float64)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
        dist.all_reduce(seen)
        ppl = perplexity(model.module, held_out, rank, world)
        if ppl < best:
            best = ppl
            if rank == 0:
                os.makedirs("out/q06", exist_ok=True)
                torch.save({"model": model.module.state_dict(), "epoch": epoch, "ppl": ppl}, "out/q06/best.pt")
        if rank == 0:
            print(f"epoch {epoch} | train nll/token {seen[0] / seen[1]:.3f} | held-out ppl {ppl:.3f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
