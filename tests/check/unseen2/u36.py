"""Sequence-to-label transformer under FSDP2, exporting a plain state dict for serving."""
import argparse
import logging
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("export")


class Layer(nn.Module):
    def __init__(self, d=32, h=2):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, h, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, x):
        y = self.n1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class SeqModel(nn.Module):
    def __init__(self, vocab=12, d=32, depth=2, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.cls = nn.Linear(d, classes)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.cls(x.mean(1))


def sequences(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 12, (n, 10), generator=g)
    return TensorDataset(ids, ((ids < 3).sum(1)).clamp(max=3))


class Exporter:
    """Writes the weights as ordinary CPU tensors, so that serving does not need the training stack."""

    def __init__(self, folder, rank):
        self.folder, self.rank = folder, rank

    @staticmethod
    def plain(t):
        t = t.to_local() if hasattr(t, "to_local") else t
        return t.detach().cpu().clone()

    def __call__(self, model, tag):
        weights = {k: self.plain(v) for k, v in model.state_dict().items()}
        if self.rank == 0:
            os.makedirs(self.folder, exist_ok=True)
            tmp = os.path.join(self.folder, f".{tag}.tmp")
            torch.save({"weights": weights, "tag": tag}, tmp)
            os.replace(tmp, os.path.join(self.folder, f"{tag}.pt"))
        dist.barrier()


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(33)
    model = SeqModel()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train, val = sequences(512, 1), sequences(128, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=7)
    loader = DataLoader(train, args.batch, sampler=sampler)
    val_loader = DataLoader(val, 32, sampler=DistributedSampler(val, world, rank, shuffle=False))
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=8)
    export = Exporter(args.folder, rank)

    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        tot = torch.zeros(2)
        for ids, y in loader:
            loss = F.cross_entropy(model(ids), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            warm.step()
            tot += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(tot)
        model.eval()
        hit = torch.zeros(2)
        with torch.no_grad():
            for ids, y in val_loader:
                hit += torch.tensor([(model(ids).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(hit)
        acc = (hit[0] / hit[1]).item()
        log.info("epoch %d loss %.4f acc %.3f", epoch, tot[0] / tot[1], acc)
        if acc > best:
            best = acc
            export(model, "best")
    export(model, "last")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "seq_export"))
    args = ap.parse_args()
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING, format="%(message)s")
    run(args)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
