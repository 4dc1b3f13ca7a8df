"""FSDP2 row-transformer on digits with a learned temperature and EMA weights."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class RowFormer(nn.Module):
    def __init__(self, dim=48, depth=2, heads=4):
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(8, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.protos = nn.Parameter(torch.randn(10, dim))
        self.log_temp = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        h = self.embed(x) + self.pos
        for blk in self.blocks:
            h = blk(h)
        h = F.normalize(h.mean(1), dim=-1)
        return self.log_temp.exp() * h @ F.normalize(self.protos, dim=-1).T


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def clip_by_global_norm(params, max_norm):
    sq = torch.zeros(())
    for p in (p for p in params if isinstance(p.grad, DTensor)):
        sq += p.grad.to_local().pow(2).sum()
    dist.all_reduce(sq)
    for p in (p for p in params if not isinstance(p.grad, DTensor)):
        sq += p.grad.pow(2).sum()
    norm = sq.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        local(p.grad).mul_(scale)
    return norm.item()


class ShardEMA:
    def __init__(self, params, decay=0.9):
        self.params, self.decay = params, decay
        self.shadow = [local(p.detach()).clone() for p in params]

    @torch.no_grad()
    def update(self):
        for s, p in zip(self.shadow, self.params):
            s.lerp_(local(p.detach()), 1 - self.decay)

    @torch.no_grad()
    def swap(self):
        for s, w in zip(self.shadow, (local(p.detach()) for p in self.params)):
            kept = w.clone()
            w.copy_(s), s.copy_(kept)


@torch.no_grad()
def evaluate(model, x, y, batch=45):
    model.eval()
    hits = sum((model(xb).argmax(1) == yb).sum() for xb, yb in zip(x.split(batch), y.split(batch)))
    stat = torch.stack([hits, torch.tensor(len(y))])
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--max-norm", type=float, default=0.5)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--out", default="./out/a04")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(y)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    train_idx, val_idx = perm[:1437], perm[1437:][rank::world]  # 360 for validation
    train_set = TensorDataset(x[train_idx], y[train_idx])
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    model = RowFormer()
    scalars = {model.log_temp}
    [fully_shard(blk, mesh=mesh) for blk in model.blocks]
    fully_shard(model, mesh=mesh, ignored_params=scalars, reshard_after_forward=True)
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=args.lr, weight_decay=0.01)
    ema = ShardEMA(params)
    torch.manual_seed(args.seed + 1 + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            for p in scalars:
                dist.all_reduce(p.grad)
                p.grad /= world
            norm = clip_by_global_norm(params, args.max_norm)
            opt.step()
            ema.update()
        ema.swap()
        acc = evaluate(model, x[val_idx], y[val_idx])
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        ema.swap()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} |g| {norm:.3f} ema acc {acc:.4f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save(full, os.path.join(args.out, f"ema_{epoch}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
