"""Tied-embedding language model with FSDP2, gradient accumulation, full checkpoints."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB = 40
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.conv = nn.Conv1d(d, 2 * d, 3)
        self.proj = nn.Linear(d, d)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (2, 0))
        return x + self.proj(F.glu(self.conv(h), dim=1).transpose(1, 2))


class LM(nn.Module):
    def __init__(self, d=48, depth=3):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, VOCAB, bias=False)
        nn.init.normal_(self.emb.weight, std=0.1)
        self.out.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def corpus(n, seed, length=20):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (n, length + 1), generator=g)
    for t in range(2, length + 1):
        rule = (ids[:, t - 1] + 3 * ids[:, t - 2]) % VOCAB
        keep = torch.rand(n, generator=g) < 0.9
        ids[:, t] = torch.where(keep, rule, ids[:, t])
    return TensorDataset(ids)


def nll(logits, ids, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model, data, rank, world, device):
    model.eval()
    ids = data.tensors[0]
    shards = ids.tensor_split(world)
    rounds = max(-(-len(s) // 32) for s in shards)
    mine = shards[rank]
    acc = torch.zeros(2, dtype=torch.float64, device=device)
    for r in range(rounds):
        chunk = mine[r * 32:(r + 1) * 32].to(device)
        weight = 1.0 if len(chunk) else 0.0
        chunk = chunk if len(chunk) else ids[:1].to(device)
        acc[0] += weight * nll(model(chunk[:, :-1]), chunk, "sum")
        acc[1] += weight * chunk[:, 1:].numel()
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--resume", default=None)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))

    torch.manual_seed(args.seed)
    model = LM().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train, val = corpus(1024, 1), corpus(145, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    updates = len(loader) // args.accum
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=updates * args.epochs, cycle_momentum=False)

    start = 0
    if args.resume:
        ck = torch.load(args.resume, map_location="cpu", weights_only=True)
        set_model_state_dict(model, ck["model"] if rank == 0 else {}, options=FROM_RANK0)
        set_optimizer_state_dict(model, opt, ck["opt"] if rank == 0 else {}, options=FROM_RANK0)
        sched.load_state_dict(ck["sched"])
        start = ck["epoch"] + 1
    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="tied_")
        os.makedirs(out, exist_ok=True)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        total, gnorm = torch.zeros((), device=device), 0.0
        for i, (ids,) in enumerate(loader):
            if i >= updates * args.accum:
                break
            step_now = (i + 1) % args.accum == 0
            model.set_requires_gradient_sync(step_now)
            ids = ids.to(device)
            loss = nll(model(ids[:, :-1]), ids)
            (loss / args.accum).backward()
            total += loss.detach()
            if step_now:
                gnorm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
                opt.step()
                sched.step()
                opt.zero_grad()
        dist.all_reduce(total)
        val_nll = evaluate(model, val, rank, world, device)
        msd = get_model_state_dict(model, options=FULL)
        osd = get_optimizer_state_dict(model, opt, options=FULL)
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / (updates * args.accum * world):.4f} "
                  f"val {val_nll:.4f} gnorm {gnorm:.3f}")
            torch.save({"model": msd, "opt": osd, "sched": sched.state_dict(), "epoch": epoch},
                       os.path.join(out, "last.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
