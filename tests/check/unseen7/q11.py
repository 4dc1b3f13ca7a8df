#!/usr/bin/env python
# A decoder learns to write a digit string backwards.  FSDP2, one unit per block.
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

DIGITS, N, SEP = 10, 8, 10
CTX = 2 * N
WIDTH, HEADS, DEPTH = 64, 4, 2
BATCH, STEPS, EPOCHS = 24, 20, 3
LR, MAX_NORM = 0.3, 0.25


def strings(count, seed):
    g = torch.Generator().manual_seed(seed)
    s = torch.randint(0, DIGITS, (count, N), generator=g)
    seq = torch.cat([s, torch.full((count, 1), SEP), s.flip(1)], 1)
    return seq[:, :-1], seq[:, 1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.n2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(DIGITS + 1, WIDTH)
        self.pos = nn.Parameter(0.02 * torch.randn(CTX, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, DIGITS + 1)

    def forward(self, x):
        h = self.tok(x) + self.pos[: x.size(1)]
        for b in self.blocks:
            h = b(h)
        return self.head(self.norm(h))


def limit_gradients(params, max_norm):
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm


@torch.no_grad()
def exact(model, rank, world, count=128):
    x, y = strings(count, 999)
    x, y = x[rank::world], y[rank::world]
    right = model(x).argmax(-1) == y
    c = right[:, N:].float().mean(1).sum()
    dist.all_reduce(c)
    return c.item() / count


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Decoder()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=LR, momentum=0.9)
    total = EPOCHS * STEPS
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 8) * (1 - s / (total + 1)))

    begin = time.time()
    for epoch in range(EPOCHS):
        acc = torch.zeros(())
        for step in range(STEPS):
            # fresh strings for each process and step
            x, y = strings(BATCH, 10_000 + (epoch * STEPS + step) * world + rank)
            logits = model(x)
            loss = F.cross_entropy(logits[:, N:].flatten(0, 1), y[:, N:].flatten())
            loss.backward()
            limit_gradients(params, MAX_NORM)
            opt.step()
            sched.step()
            opt.zero_grad()
            acc += loss.detach()
        dist.all_reduce(acc)
        hit = exact(model, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {acc.item() / (STEPS * world):.4f} digits right {hit:.3f} "
                  f"({time.time() - begin:.1f}s)", flush=True)

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        os.makedirs("out/q11", exist_ok=True)
        torch.save(weights, "out/q11/decoder.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
