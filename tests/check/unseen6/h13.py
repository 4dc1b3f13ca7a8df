"""Next-item recommendation (SASRec flavour) trained with fully_shard.

    torchrun --nproc_per_node 2 h13.py
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

N_ITEMS, SEQ, DIM = 300, 12, 48
MAX_NORM = 0.25
OUT_DIR = "out/h13"


def sessions(n_users, seed=0):
    """Users walk through one of 15 genres; now and then they wander off."""
    g = torch.Generator().manual_seed(seed)
    genre = torch.randint(0, 15, (n_users,), generator=g)
    pos = torch.randint(0, 20, (n_users,), generator=g)
    cols = []
    for _ in range(SEQ + 1):
        stray = torch.rand(n_users, generator=g) < 0.15
        item = genre * 20 + pos
        cols.append(torch.where(stray, torch.randint(0, N_ITEMS, (n_users,), generator=g), item))
        pos = (pos + torch.randint(1, 4, (n_users,), generator=g)) % 20
    return torch.stack(cols, 1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, mask):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ff(self.ln2(x))


class SeqRec(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(N_ITEMS, DIM)
        self.pos = nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(DIM)
        self.score = nn.Linear(DIM, N_ITEMS)
        nn.init.normal_(self.item.weight, std=0.5)

    def forward(self, seq):
        mask = torch.triu(torch.ones(SEQ, SEQ, dtype=torch.bool), 1)
        h = self.item(seq) + self.pos.weight
        for layer in self.layers:
            h = layer(h, mask)
        return self.score(self.norm(h).flatten(0, 1))


def clip_sharded_(params, max_norm):
    """Global-norm clipping on the shards, without materialising full gradients."""
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    total = torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt()
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return total


@torch.no_grad()
def hit_rate(model, loader, k=10):
    model.eval()
    acc = torch.zeros(2)
    for (s,) in loader:
        top = model(s[:, :-1]).view(len(s), SEQ, -1)[:, -1].topk(k, dim=-1).indices
        acc[0] += (top == s[:, -1:]).any(1).sum()
        acc[1] += len(s)
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))

    data = sessions(1760)
    train, valid = TensorDataset(data[:1536]), TensorDataset(data[1536:])
    sampler = DistributedSampler(train, seed=9)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)
    vloader = DataLoader(valid, batch_size=56, sampler=DistributedSampler(valid, shuffle=False))

    torch.manual_seed(9)
    model = SeqRec()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4 * len(loader))

    for epoch in range(4):
        t0 = time.time()
        sampler.set_epoch(epoch)
        model.train()
        stats = torch.zeros(3)
        for (s,) in loader:
            loss = F.cross_entropy(model(s[:, :-1]), s[:, 1:].flatten())
            loss.backward()
            gnorm = clip_sharded_(list(model.parameters()), MAX_NORM)
            opt.step()
            opt.zero_grad()
            sched.step()
            stats += torch.tensor([loss.item(), gnorm.item(), 1.0])
        dist.all_reduce(stats)
        hr = hit_rate(model, vloader)
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0] / stats[2]:.3f} grad {stats[1] / stats[2]:.3f} "
                  f"HR@10 {hr:.3f} ({time.time() - t0:.1f}s)", flush=True)

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        os.makedirs(OUT_DIR, exist_ok=True)
        torch.save(weights, os.path.join(OUT_DIR, "seqrec.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
