"""Tiny language model on sequences of varying length, with gradient accumulation."""
import argparse
import contextlib
import itertools
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, VOCAB = 0, 24


class CountingSequences(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            start, stride, length = torch.randint(1, 1000, (3,), generator=g).tolist()
            length = 4 + length % 20
            stride = 1 + stride % 3
            self.rows.append(torch.tensor([1 + (start + i * stride) % (VOCAB - 1) for i in range(length)]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


class GRULM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def summed_loss(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD, reduction="sum")


def groups(loader, size):
    it = iter(loader)
    while group := list(itertools.islice(it, size)):
        yield group


@torch.no_grad()
def perplexity(model, data, batch_size, rank, world, device):
    model.eval()
    stat = torch.zeros(2, dtype=torch.float64, device=device)
    mine = [data[i] for i in range(rank, len(data), world)]
    for i in range(0, len(mine), batch_size):
        ids = collate(mine[i:i + batch_size]).to(device)
        stat[0] += summed_loss(model, ids)
        stat[1] += (ids[:, 1:] != PAD).sum()
    dist.all_reduce(stat)
    model.train()
    return math.exp((stat[0] / stat[1]).item())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=2)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    train, val = CountingSequences(688, seed=1), CountingSequences(123, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, collate_fn=collate)

    ddp = DDP(GRULM().to(device), device_ids=[local] if cuda else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
    steps_per_epoch = math.ceil(len(loader) / args.accum)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr,
                                                    total_steps=args.epochs * steps_per_epoch)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(2, dtype=torch.float64, device=device)
        for group in groups(loader, args.accum):
            group = [ids.to(device) for ids in group]
            tokens = torch.stack([(ids[:, 1:] != PAD).sum() for ids in group]).sum().float()
            dist.all_reduce(tokens)
            optimizer.zero_grad(set_to_none=True)
            for k, ids in enumerate(group):
                last = k == len(group) - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    loss = summed_loss(ddp, ids)
                    (loss * world / tokens).backward()
                epoch_loss[0] += loss.detach()
            epoch_loss[1] += tokens / world
            nn.utils.clip_grad_norm_(ddp.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
        dist.all_reduce(epoch_loss)
        ppl = perplexity(ddp.module, val, 32, rank, world, device)
        if rank == 0:
            print(f"epoch {epoch} loss {(epoch_loss[0] / epoch_loss[1]).item():.4f} val_ppl {ppl:.3f} "
                  f"lr {scheduler.get_last_lr()[0]:.2e}", flush=True)

    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="grulm_")
        os.makedirs(out, exist_ok=True)
        torch.save({"model": ddp.module.state_dict(), "args": vars(args)}, os.path.join(out, "last.pt"))
        print("wrote", out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
