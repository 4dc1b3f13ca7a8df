"""Character model with token-normalised loss over accumulation windows, DDP."""
import argparse
import itertools
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

VOCAB, IGNORE = 26, -1


class Words(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            k = int(torch.randint(3, 30, (1,), generator=g))
            start, step = torch.randint(0, VOCAB, (2,), generator=g).tolist()
            word = (start + (step % 5 + 1) * torch.arange(k)) % VOCAB
            noise = torch.rand(k, generator=g) < 0.05
            self.rows.append(torch.where(noise, torch.randint(0, VOCAB, (k,), generator=g), word))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i][:-1], self.rows[i][1:]


def collate(rows):
    x, y = zip(*rows)
    return pad_sequence(x, batch_first=True), pad_sequence(y, batch_first=True, padding_value=IGNORE)


class CharLM(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, VOCAB, bias=False)
        nn.init.normal_(self.emb.weight, std=0.1)
        self.out.weight = self.emb.weight

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def summed(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")


def train_epoch(model, loader, opt, sched, accum, device):
    world = dist.get_world_size()
    it = iter(loader)
    seen = torch.zeros(2, dtype=torch.float64, device=device)
    while group := list(itertools.islice(it, accum)):
        group = [(x.to(device), y.to(device)) for x, y in group]
        tokens = torch.stack([(y != IGNORE).sum() for _, y in group]).sum()
        dist.all_reduce(tokens)
        opt.zero_grad(set_to_none=True)
        with model.no_sync():
            for x, y in group[:-1]:
                loss = summed(model, x, y)
                (loss * (world / tokens)).backward()
                seen[0] += loss.detach()
        x, y = group[-1]
        loss = summed(model, x, y)
        (loss * (world / tokens)).backward()
        seen[0] += loss.detach()
        seen[1] += tokens / world
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
    dist.all_reduce(seen)
    return (seen[0] / seen[1]).item()


@torch.no_grad()
def perplexity(model, loader, device):
    model.eval()
    s = torch.zeros(2, dtype=torch.float64, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        s[0] += summed(model.module, x, y)
        s[1] += (y != IGNORE).sum()
    dist.all_reduce(s)
    model.train()
    return math.exp((s[0] / s[1]).item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=12)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device, ids = torch.device("cuda", local_rank), [local_rank]
        dist.init_process_group("nccl")
    else:
        device, ids = torch.device("cpu"), None
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, val = Words(1000, 1), Words(161, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, collate_fn=collate)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=32, collate_fn=collate)

    torch.manual_seed(args.seed)
    model = DDP(CharLM().to(device), device_ids=ids)
    decay = [p for p in model.parameters() if p.ndim > 1]
    flat = [p for p in model.parameters() if p.ndim == 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": flat, "weight_decay": 0.0}], lr=args.lr)
    total = args.epochs * math.ceil(len(loader) / args.accum)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1.0, (s + 1) / 8) * 0.5 * (1 + math.cos(math.pi * min(s, total) / total)))

    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="chars_")
        os.makedirs(out, exist_ok=True)
    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        nll = train_epoch(model, loader, opt, sched, args.accum, device)
        ppl = perplexity(model, val_loader, device)
        better, best = ppl < best, min(ppl, best)
        if rank == 0:
            print(f"epoch {epoch} nll/token {nll:.4f} val ppl {ppl:.3f} lr {sched.get_last_lr()[0]:.2e}")
            state = {"model": model.module.state_dict(), "opt": opt.state_dict(),
                     "sched": sched.state_dict(), "epoch": epoch, "best": best}
            torch.save(state, os.path.join(out, "last.pt"))
            if better:
                torch.save(state, os.path.join(out, "best.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
