"""Denoising autoencoder with EMA teacher and restartable training."""
import argparse
import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


class DAE(nn.Module):
    def __init__(self, hidden=96, code=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, code))
        self.dec = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x):
        return self.dec(self.enc(x))


def batches(n, batch, epoch, rank, world, seed):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
    mine = order[: n - n % (world * batch)][rank::world]
    return mine.split(batch)


@torch.no_grad()
def validate(net, clean, noisy):
    was = net.training
    net.eval()
    loss = F.mse_loss(net(noisy), clean).item()
    net.train(was)
    return loss


def save(path, epoch, model, teacher, optimizer, best):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch, "model": model.module.state_dict(), "teacher": teacher.state_dict(),
                    "optimizer": optimizer.state_dict(), "rng": states, "best": best}, path)
    dist.barrier()


def run(args, folder, stop_after):
    rank, world = dist.get_rank(), dist.get_world_size()
    path = os.path.join(folder, "last.pt")
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
    perm = torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed))
    val, train = data[perm[:297]], data[perm[297:]]
    val_noisy = val + 0.3 * torch.randn(val.shape, generator=torch.Generator().manual_seed(args.seed + 1))

    torch.manual_seed(args.seed)
    net = DAE()
    teacher = copy.deepcopy(net).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    torch.manual_seed(args.seed * 7919 + rank)
    start, best = 0, float("inf")
    if os.path.exists(path):
        ckpt = torch.load(path, map_location="cpu", weights_only=False)
        net.load_state_dict(ckpt["model"])
        teacher.load_state_dict(ckpt["teacher"])
        optimizer.load_state_dict(ckpt["optimizer"])
        torch.set_rng_state(ckpt["rng"][rank])
        start, best = ckpt["epoch"] + 1, ckpt["best"]
    model = DDP(net)

    for epoch in range(start, min(stop_after, args.epochs)):
        total = torch.zeros(2)
        for idx in batches(len(train), args.batch_size, epoch, rank, world, args.seed):
            x = train[idx]
            noisy = x + 0.3 * torch.randn_like(x)
            with torch.no_grad():
                target = teacher(noisy)
            out = model(noisy)
            loss = F.mse_loss(out, x) + 0.1 * F.mse_loss(out, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), net.parameters()):
                    t.mul_(args.ema).add_(s, alpha=1 - args.ema)
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        score = validate(teacher, val, val_noisy)
        if score < best:
            best = score
            if rank == 0:
                torch.save(teacher.state_dict(), os.path.join(folder, "best_teacher.pt"))
        if rank == 0:
            print(f"epoch {epoch}: train {total[0] / total[1]:.5f} teacher val {score:.5f}")
        save(path, epoch, model, teacher, optimizer, best)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--ema", type=float, default=0.9)
    ap.add_argument("--seed", type=int, default=6)
    ap.add_argument("--interrupt-after", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp(prefix="dae_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    run(args, folder[0], stop_after=args.interrupt_after)
    run(args, folder[0], stop_after=args.epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
