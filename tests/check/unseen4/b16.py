"""Tiny GPT on a stream of tokenised shards, blocks wrapped by fully_shard.  torchrun ... b16.py"""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

VOCAB, EOT = 64, 0


def read_shard(name):
    """Stands in for np.memmap(name): yields documents of a second-order Markov source."""
    split, k = name.split("-")
    rng = random.Random(f"{split}/{k}")
    for _ in range(120):
        doc = [rng.randrange(1, VOCAB), rng.randrange(1, VOCAB)]
        for _ in range(rng.randint(10, 70)):
            a, b = doc[-2:]
            doc.append(1 + (3 * a + 5 * b + rng.choice((0, 0, 0, 1, 7))) % (VOCAB - 1))
        yield doc + [EOT]


class PackedStream(IterableDataset):
    """Endless stream of seq_len + 1 windows, documents packed back to back, shard order reshuffled every pass."""

    def __init__(self, shards, seq_len, seed=0, endless=True):
        self.shards, self.seq_len, self.seed, self.endless = list(shards), seq_len, seed, endless

    def __iter__(self):
        info = get_worker_info()
        worker, n_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        mine = self.shards[worker::n_workers]
        rng = random.Random(self.seed)
        buf = []
        while True:
            if self.endless:
                rng.shuffle(mine)
            for shard in mine:
                for doc in read_shard(shard):
                    buf.extend(doc)
                    while len(buf) > self.seq_len:
                        yield torch.tensor(buf[:self.seq_len + 1])
                        buf = buf[self.seq_len:]
            if not self.endless:
                return


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(att.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, dim=64, heads=4, depth=2, seq_len=48):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def lm_loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--steps_per_epoch", type=int, default=20)
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--seq_len", type=int, default=48)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=1337)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(args.seed)
    model = GPT(seq_len=args.seq_len)
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    train = PackedStream([f"train-{i:03d}" for i in range(16)], args.seq_len, seed=args.seed)
    stream = iter(DataLoader(train, batch_size=args.batch_size, num_workers=args.workers))
    val = DataLoader(PackedStream(["val-000"], args.seq_len, endless=False), batch_size=32)

    step = 0
    for epoch in range(args.epochs):
        for _ in range(args.steps_per_epoch):
            for g in opt.param_groups:
                g["lr"] = args.lr * min(1.0, (step + 1) / 8)
            loss = lm_loss(model, next(stream))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            step += 1
            if step % 5 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if rank == 0:
                    tokens = step * args.batch_size * args.seq_len * world
                    print(f"step {step} tokens {tokens} loss {mean.item() / world:.4f}", flush=True)
        with torch.no_grad():
            losses = torch.stack([lm_loss(model, b) * len(b) for b in val]).sum() / sum(len(b) for b in val)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            print(f"epoch {epoch} val loss {losses.item():.4f}", flush=True)
            os.makedirs("out", exist_ok=True)
            torch.save({"model": full, "step": step}, "out/gpt.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
