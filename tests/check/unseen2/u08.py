"""Masked-token model on variable-length sequences; loss is normalised by the global token count."""
import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD, MASK, VOCAB = 0, 1, 24


class Sentences(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(4, 20, (1,), generator=g))
            start = int(torch.randint(2, VOCAB, (1,), generator=g))
            step = int(torch.randint(1, 4, (1,), generator=g))
            self.items.append(torch.tensor([2 + (start - 2 + step * k) % (VOCAB - 2) for k in range(length)]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class MaskCollator:
    def __init__(self, prob, seed):
        self.prob = prob
        self.gen = torch.Generator().manual_seed(seed)

    def __call__(self, seqs):
        ids = pad_sequence(seqs, batch_first=True, padding_value=PAD)
        pick = (torch.rand(ids.shape, generator=self.gen) < self.prob) & (ids != PAD)
        pick[:, 0] = True
        labels = torch.where(pick, ids, torch.full_like(ids, -100))
        return torch.where(pick, torch.full_like(ids, MASK), ids), labels


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.pos = nn.Parameter(torch.randn(1, 32, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h = self.emb(ids) + self.pos[:, : ids.size(1)]
        return self.out(self.enc(h, src_key_padding_mask=ids == PAD))


def token_mean_loss(logits, labels, world):
    """Sum over local tokens; scaled so DDP's mean over ranks gives the mean over all tokens."""
    count = (labels != -100).sum().float()
    dist.all_reduce(count)
    summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return summed * world / count, summed.detach(), count


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(Encoder())
    data = Sentences(480, 1)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(data, args.batch_size, sampler=sampler, collate_fn=MaskCollator(0.2, 1000 + rank))
    val = Sentences(101, 2)
    val_loader = DataLoader([val[i] for i in range(rank, len(val), world)], 32,
                            collate_fn=MaskCollator(0.2, 77 + rank))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.epochs * len(loader)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 10, math.sqrt(10 / (s + 1)), 1.0)
                                              if s < total else 0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        acc = torch.zeros(2)
        for ids, labels in loader:
            loss, s, n = token_mean_loss(model(ids), labels, world)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            dist.all_reduce(s)
            acc += torch.stack([s, n])
        nll, top1 = evaluate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch} train {acc[0] / acc[1]:.3f} val {nll:.3f} acc {top1:.3f}", flush=True)


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    s = torch.zeros(3)
    for ids, labels in loader:
        logits = net(ids)
        keep = labels != -100
        s[0] += F.cross_entropy(logits[keep], labels[keep], reduction="sum")
        s[1] += (logits[keep].argmax(-1) == labels[keep]).sum()
        s[2] += keep.sum()
    dist.all_reduce(s)
    return (s[0] / s[2]).item(), (s[1] / s[2]).item()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=21)
    cli = ap.parse_args()
    dist.init_process_group("gloo")
    train(cli)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()
