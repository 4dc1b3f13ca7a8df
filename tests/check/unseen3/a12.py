"""FSDP2 regression transformer with micro-batches and hand-written clipping."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SetEncoder(nn.Module):
    def __init__(self, d_in=3, dim=33, depth=2):
        super().__init__()
        self.inp = nn.Linear(d_in, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, nhead=3, dim_feedforward=66, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(h.mean(1)).squeeze(-1)


def point_sets(n, seed, points=8):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, points, 3, generator=g)
    spread = torch.cdist(x, x).amax(dim=(1, 2))
    return TensorDataset(x, (spread - 1.05) / 0.15)


@torch.no_grad()
def clip_by_global_norm(params, max_norm):
    params = [p for p in params if p.grad is not None]
    square = torch.stack([p.grad.to_local().float().pow(2).sum() for p in params]).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        p.grad.to_local().mul_(scale)
    return norm


@torch.no_grad()
def evaluate(model, data, batch_size, device):
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = data.tensors
    stat = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, len(x), batch_size * world):
        chunk = slice(start, start + batch_size * world)
        bx, by = x[chunk].to(device), y[chunk].to(device)
        keep = torch.arange(len(bx), device=device) % world == rank
        mine = bx[keep] if keep.any() else bx[:1]
        pred = model(mine)
        if keep.any():
            stat[0] += F.mse_loss(pred, by[keep], reduction="sum")
            stat[1] += keep.sum()
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item(), int(stat[1])


def save(model, optimizer, scheduler, epoch, out):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save({"model": model_state, "optimizer": optim_state, "scheduler": scheduler.state_dict(),
                    "epoch": epoch}, os.path.join(out, "last.pt"))
    dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--micro-batch", type=int, default=8)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--clip", type=float, default=0.5)
    p.add_argument("--seed", type=int, default=4)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [args.out or tempfile.mkdtemp(prefix="sets_")] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    os.makedirs(box[0], exist_ok=True)

    torch.manual_seed(args.seed)
    model = SetEncoder().to(device)
    mesh = init_device_mesh(device.type, (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    train, val = point_sets(512, seed=1), point_sets(131, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.micro_batch * args.accum, sampler=sampler, drop_last=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_loss = torch.zeros((), device=device)
        for x, y in loader:
            pieces = list(zip(x.to(device).chunk(args.accum), y.to(device).chunk(args.accum)))
            for i, (mx, my) in enumerate(pieces):
                model.set_requires_gradient_sync(i == len(pieces) - 1)
                loss = F.mse_loss(model(mx), my) / len(pieces)
                loss.backward()
                train_loss += loss.detach()
            norm = clip_by_global_norm(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        dist.all_reduce(train_loss)
        mse, n = evaluate(model, val, 16, device)
        if rank == 0:
            print(f"epoch {epoch} train {train_loss.item() / world / len(loader):.4f} "
                  f"val_mse {mse:.4f} ({n}) grad_norm {norm.item():.3f}", flush=True)
        save(model, optimizer, scheduler, epoch, box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
