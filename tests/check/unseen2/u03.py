"""Small decoder-only LM sharded with FSDP2; full checkpoint gathered to rank 0."""
import argparse
import os
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    vocab: int = 32
    dim: int = 32
    heads: int = 2
    layers: int = 2
    ctx: int = 16


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.qkv, self.proj = nn.Linear(c.dim, 3 * c.dim), nn.Linear(c.dim, c.dim)
        self.ff = nn.Sequential(nn.Linear(c.dim, 2 * c.dim), nn.GELU(), nn.Linear(2 * c.dim, c.dim))
        self.heads = c.heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.ln2(x))


class LM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab, c.dim), nn.Embedding(c.ctx, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.ln = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.ln(x))


def markov(n, ctx, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(0, vocab, (vocab, 2), generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(n, ctx + 1, dtype=torch.long)
    ids[:, 0] = torch.randint(0, vocab, (n,), generator=g)
    for t in range(ctx):
        pick = torch.randint(0, 2, (n,), generator=g)
        ids[:, t + 1] = table[ids[:, t], pick]
    return TensorDataset(ids)


def shard(model, mesh):
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def evaluate(model, loader):
    model.eval()
    tot = torch.zeros(2)
    with torch.no_grad():
        for (ids,) in loader:
            logits = model(ids[:, :-1])
            tot[0] += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            tot[1] += ids[:, 1:].numel()
    dist.all_reduce(tot)
    model.train()
    return (tot[0] / tot[1]).item()


def save_full(model, path, rank):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--ckpt", default=os.path.join(tempfile.gettempdir(), "lm_full.pt"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    cfg = Config()
    torch.manual_seed(1234)
    model = shard(LM(cfg), mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))

    train, val = markov(384, cfg.ctx, cfg.vocab, 1), markov(64, cfg.ctx, cfg.vocab, 2)
    ts = DistributedSampler(train, world, rank, shuffle=True)
    vs = DistributedSampler(val, world, rank, shuffle=False)
    tl, vl = DataLoader(train, args.batch, sampler=ts), DataLoader(val, args.batch, sampler=vs)

    for epoch in range(args.epochs):
        ts.set_epoch(epoch)
        for (ids,) in tl:
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        ppl = evaluate(model, vl)
        norm = norm.full_tensor()
        if rank == 0:
            print(f"epoch {epoch}: val nll {ppl:.4f} last grad norm {norm.item():.3f}")
    save_full(model, args.ckpt, rank)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
