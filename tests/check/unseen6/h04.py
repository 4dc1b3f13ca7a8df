"""Character LM, FSDP2 (fully_shard), gradient accumulation, full-state export and reload check."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, set_model_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ap = argparse.ArgumentParser()
ap.add_argument("--epochs", type=int, default=3)
ap.add_argument("--steps", type=int, default=14)
ap.add_argument("--accum", type=int, default=2)
ap.add_argument("--bs", type=int, default=8)
ap.add_argument("--ctx", type=int, default=48)
ap.add_argument("--lr", type=float, default=4e-3)
ap.add_argument("--out", default="out/h04")
args = ap.parse_args()


def corpus(n_words=6000):
    g = torch.Generator().manual_seed(0)
    lexicon = ["".join(chr(97 + c) for c in torch.randint(0, 26, (int(k),), generator=g).tolist())
               for k in torch.randint(2, 7, (40,), generator=g)]
    jump = torch.rand(40, 40, generator=g) ** 6
    word, out = 0, []
    for _ in range(n_words):
        out.append(lexicon[word])
        word = int(torch.multinomial(jump[word], 1, generator=g))
    text = " ".join(out)
    return torch.tensor([26 if c == " " else ord(c) - 97 for c in text])


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.05))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class CharLM(nn.Module):
    def __init__(self, vocab=27, d=64, depth=2, heads=4):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(args.ctx, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, vocab))

    def forward(self, x):
        h = self.emb(x) + self.pos(torch.arange(x.shape[1]))
        for blk in self.blocks:
            h = blk(h)
        return self.head(h.flatten(0, 1))


def build(mesh):
    torch.manual_seed(1)
    model = CharLM()
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def windows(data, starts):
    x = torch.stack([data[s:s + args.ctx + 1] for s in starts])
    return x[:, :-1], x[:, 1:]


@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval()
    starts = list(range(0, len(data) - args.ctx - 1, args.ctx))
    starts = starts[:len(starts) // world * world][rank::world]
    tot = torch.zeros(2)
    x, y = windows(data, starts)
    tot[0] = F.cross_entropy(model(x), y.flatten(), reduction="sum")
    tot[1] = y.numel()
    dist.all_reduce(tot)
    model.train()
    return (tot[0] / tot[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    data = corpus()
    cut = int(0.9 * len(data))
    train, val = data[:cut], data[cut:]

    model = build(mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    total = args.epochs * args.steps
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 8, 1 - 0.9 * s / total))
    # from here on every process goes its own random way: windows and dropout
    torch.manual_seed(1000 + rank)
    pick = torch.Generator().manual_seed(2000 + rank)

    for epoch in range(args.epochs):
        for _ in range(args.steps):
            for micro in range(args.accum):
                model.set_requires_gradient_sync(micro == args.accum - 1)
                starts = torch.randint(0, len(train) - args.ctx - 1, (args.bs,), generator=pick).tolist()
                x, y = windows(train, starts)
                loss = F.cross_entropy(model(x), y.flatten())
                (loss / args.accum).backward()
            gnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            opt.step()
            sched.step()
            opt.zero_grad()
        nll = evaluate(model, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} val nll {nll:.4f} |g| {gnorm.item():.2f}", flush=True)

    opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=opts)
    path = os.path.join(args.out, "model.pt")
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(full, path)
    dist.barrier()

    again = build(mesh)
    state = torch.load(path) if rank == 0 else {}
    set_model_state_dict(again, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    check = evaluate(again, val, rank, world)
    assert abs(check - nll) < 1e-4, (check, nll)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
