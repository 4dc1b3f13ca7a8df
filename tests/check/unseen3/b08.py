"""Denoising autoencoder trained in resumable segments (one per job slot)."""
import argparse
import os
import random
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AutoEncoder(nn.Module):
    def __init__(self, dim=32, code=6, p=0.2):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, code))
        self.dec = nn.Sequential(nn.Linear(code, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, dim))

    def forward(self, x):
        return self.dec(self.enc(x))


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    basis = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
    x = torch.tanh(torch.randn(n, 6, generator=g) @ basis / 2)
    return TensorDataset(x + 0.02 * torch.randn(n, 32, generator=g))


def corrupt(x):
    sigma = 0.1 + 0.5 * torch.rand(len(x), 1, device=x.device)
    keep = (torch.rand_like(x) > 0.15).float()
    shift = np.random.randint(0, 3)
    noisy = (x + sigma * torch.randn_like(x)) * keep
    if random.random() < 0.5:
        noisy = noisy.roll(shift, dims=0).lerp(noisy, 0.9)
    return noisy


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state():
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def save(path, model, opt, sched, epoch):
    ckpt = {"model": model.module.state_dict(), "opt": opt.state_dict(),
            "sched": sched.state_dict(), "epoch": epoch, "rng": rng_state()}
    torch.save(ckpt, path + ".tmp")
    os.replace(path + ".tmp", path)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    tot = torch.zeros(2, dtype=torch.float64, device=device)
    for (x,) in loader:
        x = x.to(device)
        tot[0] += F.mse_loss(model.module(x), x, reduction="sum")
        tot[1] += x.numel()
    dist.all_reduce(tot)
    model.train()
    return (tot[0] / tot[1]).item()


def run_segment(args, path, last_epoch, rank, world, device):
    seed_everything(args.seed + rank)
    train, val = make_data(1024, 1), make_data(250, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=125)

    model = DDP(AutoEncoder().to(device), device_ids=[device.index] if device.type == "cuda" else None)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)
    first = 0
    if os.path.exists(path):
        ckpt = torch.load(path, map_location="cpu", weights_only=False)
        model.module.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["opt"])
        sched.load_state_dict(ckpt["sched"])
        set_rng_state(ckpt["rng"])
        first = ckpt["epoch"] + 1

    for epoch in range(first, last_epoch):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for (x,) in loader:
            x = x.to(device)
            loss = F.mse_loss(model(corrupt(x)), x)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.detach()
        sched.step()
        dist.all_reduce(total)
        score = evaluate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / len(loader) / world:.4f} val {score:.4f}")
            save(path, model, opt, sched, epoch)
        dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--segment-epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=21)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [(args.out or tempfile.mkdtemp(prefix="dae_")) if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    os.makedirs(box[0], exist_ok=True)
    path = os.path.join(box[0], "segment.pt")

    for end in range(args.segment_epochs, args.epochs + args.segment_epochs, args.segment_epochs):
        run_segment(args, path, min(end, args.epochs), rank, world, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
