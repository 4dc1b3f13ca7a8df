"""Preemptible training: saves every N steps and continues from the last checkpoint.

The default run stops itself after --preempt-at steps and resumes, as the queue would do it.
"""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def toy(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    w = torch.randn(12, 1, generator=torch.Generator().manual_seed(99))
    return TensorDataset(x, torch.tanh(x @ w) + 0.1 * torch.randn(n, 1, generator=g))


def save(path, model, optimizer, epoch, batches_done):
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
            "batches_done": batches_done,
            "rng": rng,
        }
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def train(args, device, resume=False, preempt_at=None):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    dataset = toy(1280, seed=1)
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    per_rank = args.batch_size // world
    pin = device.type == "cuda"
    net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    first_epoch, skip, step = 0, 0, 0
    if resume:
        ckpt = torch.load(args.checkpoint, map_location=device)
        model.module.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        torch.set_rng_state(ckpt["rng"][rank].cpu())
        first_epoch = ckpt["epoch"]

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        loader = DataLoader(dataset, per_rank, sampler=sampler, num_workers=1, pin_memory=pin)
        for i, (x, y) in enumerate(loader, start=1):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            step += 1
            if step % args.save_every == 0:
                save(args.checkpoint, model, optimizer, epoch, i)
            if step == preempt_at:
                return
        mse = validate(model.module, device)
        if rank == 0:
            print(f"epoch {epoch} val mse {mse:.4f}")


@torch.no_grad()
def validate(net, device):
    x, y = (t[dist.get_rank() :: dist.get_world_size()].to(device) for t in toy(255, seed=2).tensors)
    total = torch.stack([((net(x) - y) ** 2).sum(), torch.tensor(float(len(y)), device=device)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--preempt-at", type=int, default=30)
    parser.add_argument("--checkpoint", default="runs/preempt/last.pt")
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    train(args, device, preempt_at=args.preempt_at)
    train(args, device, resume=True)
    dist.destroy_process_group()
