"""FSDP2 regression net with sharded checkpoints (DCP) and resume."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, din=15, d=31, depth=3):
        super().__init__()
        self.stem = nn.Linear(din, d)
        self.blocks = nn.ModuleList(Residual(d) for _ in range(depth))
        self.head = nn.Linear(d, 1)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x).squeeze(-1)


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 15, generator=g)
    y = torch.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2] + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(x, y)


@torch.no_grad()
def clip_sharded(params, max_norm, group):
    shards = [p.grad.to_local() for p in params if p.grad is not None]
    sq = torch.zeros((), dtype=torch.float32, device=shards[0].device)
    for s in shards:
        if s.numel():
            sq += s.float().pow(2).sum()
    dist.all_reduce(sq, group=group)
    norm = sq.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for s in shards:
        s.mul_(scale)
    return norm


@torch.no_grad()
def evaluate(model, dataset, rank, world, device, batch=64):
    model.eval()
    x, y = dataset.tensors
    stats = torch.zeros(2, dtype=torch.float64, device=device)
    rounds = -(-len(y) // (batch * world))
    for r in range(rounds):
        lo = (r * world + rank) * batch
        xb, yb = x[lo:lo + batch].to(device), y[lo:lo + batch].to(device)
        if len(yb) == 0:
            model(x[:1].to(device))
            continue
        stats[0] += F.mse_loss(model(xb).float(), yb, reduction="sum")
        stats[1] += len(yb)
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[1]).item()


class Progress:
    def __init__(self):
        self.epoch = 0

    def state_dict(self):
        return {"epoch": torch.tensor(self.epoch)}

    def load_state_dict(self, sd):
        self.epoch = int(sd["epoch"])


def save(folder, model, opt, sched, progress):
    msd, osd = get_state_dict(model, opt)
    dcp.save({"model": msd, "opt": osd, "sched": sched.state_dict(), "progress": progress.state_dict()},
             checkpoint_id=folder)


def load(folder, model, opt, sched, progress):
    msd, osd = get_state_dict(model, opt)
    state = {"model": msd, "opt": osd, "sched": sched.state_dict(), "progress": progress.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    sched.load_state_dict(state["sched"])
    progress.load_state_dict(state["progress"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--resume", default=None, help="folder of a checkpoint")
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [(args.out or tempfile.mkdtemp(prefix="dcp_")) if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    out = box[0]
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(args.seed)
    model = Net().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for b in model.blocks:
        fully_shard(b, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train, val = data(1024, 1), data(401, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs * len(loader))
    progress = Progress()
    if args.resume:
        load(args.resume, model, opt, sched, progress)

    for epoch in range(progress.epoch, args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = F.mse_loss(model(x.to(device)).float(), y.to(device))
            opt.zero_grad()
            loss.backward()
            gnorm = clip_sharded(list(model.parameters()), args.clip, mesh.get_group())
            opt.step()
            sched.step()
            total += loss.detach()
        dist.all_reduce(total)
        val_mse = evaluate(model, val, rank, world, device)
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / len(loader) / world:.4f} val {val_mse:.4f} "
                  f"gnorm {gnorm.item():.3f} lr {sched.get_last_lr()[0]:.2e}")
        progress.epoch = epoch + 1
        save(os.path.join(out, f"epoch_{epoch}"), model, opt, sched, progress)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
