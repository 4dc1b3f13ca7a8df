"""FSDP2 + bf16 compute + gradient accumulation, with sharded (DCP) checkpoints and restart."""
import argparse
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.norm(x))))


class ResMLP(nn.Module):
    def __init__(self, din=22, d=32, depth=3, out=6):
        super().__init__()
        self.inp = nn.Linear(din, d)
        self.blocks = nn.ModuleList(ResBlock(d) for _ in range(depth))
        self.out = nn.Linear(d, out)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x)


class AppState(Stateful):
    def __init__(self, model, opt):
        self.model, self.opt = model, opt

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o}

    def load_state_dict(self, s):
        set_state_dict(self.model, self.opt, model_state_dict=s["model"], optim_state_dict=s["opt"])


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    c = torch.randn(6, 22, generator=torch.Generator().manual_seed(2))
    y = torch.randint(0, 6, (n,), generator=g)
    return TensorDataset(c[y] + 1.3 * torch.randn(n, 22, generator=g), y)


def build(lr):
    torch.manual_seed(30)
    model = ResMLP()
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for b in model.blocks:
        fully_shard(b, mp_policy=mp)
    fully_shard(model, mp_policy=mp)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def train_epoch(model, opt, loader, accum):
    n = len(loader)
    s = torch.zeros(2)
    for i, (x, y) in enumerate(loader):
        boundary = (i + 1) % accum == 0 or i + 1 == n
        window = accum if i < n - n % accum else n % accum
        model.set_requires_gradient_sync(boundary)
        loss = F.cross_entropy(model(x).float(), y)
        (loss / window).backward()
        s += torch.tensor([loss.item() * len(y), len(y)])
        if boundary:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    s = torch.zeros(2)
    for x, y in loader:
        s += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(s)
    model.train()
    return (s[0] / s[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--bs", type=int, default=8)
    p.add_argument("--accum", type=int, default=3)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--ckpt", default=os.path.join(tempfile.gettempdir(), "resmlp_dcp"))
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        shutil.rmtree(a.ckpt, ignore_errors=True)
    dist.barrier()

    train, val = make(400, 1), make(120, 2)
    ts = DistributedSampler(train, world, rank, shuffle=True)
    tl = DataLoader(train, a.bs, sampler=ts)
    vl = DataLoader(val, 30, sampler=DistributedSampler(val, world, rank, shuffle=False))
    model, opt = build(a.lr)
    for epoch in range(a.epochs):
        ts.set_epoch(epoch)
        loss = train_epoch(model, opt, tl, a.accum)
        acc = accuracy(model, vl)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} acc {acc:.3f}", flush=True)
    dcp.save({"app": AppState(model, opt)}, checkpoint_id=a.ckpt)

    fresh, fresh_opt = build(a.lr)
    dcp.load({"app": AppState(fresh, fresh_opt)}, checkpoint_id=a.ckpt)
    ts.set_epoch(a.epochs)
    before = accuracy(fresh, vl)
    loss = train_epoch(fresh, fresh_opt, tl, a.accum)
    after = accuracy(fresh, vl)
    if rank == 0:
        print(f"restart: acc {before:.3f} -> {after:.3f} (loss {loss:.4f})", flush=True)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
