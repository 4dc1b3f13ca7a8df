"""Denoising autoencoder with dropout."""
import argparse
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(128, 32), nn.ReLU(),
            nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(128, 64),
        )

    def forward(self, x):
        return self.net(x)


def corrupt(x, sigma):
    return x + sigma * torch.randn_like(x)


@torch.no_grad()
def evaluate(net, x, sigma, device):
    """Same noise in every evaluation; every rank takes each world_size-th image."""
    net.eval()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    r, w = dist.get_rank(), dist.get_world_size()
    clean, noise = x[r::w].to(device), noise[r::w].to(device)
    sums = torch.tensor([F.mse_loss(net(clean + sigma * noise), clean, reduction="sum"), clean.numel()], device=device)
    dist.all_reduce(sums)
    net.train()
    return (sums[0] / sums[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=60)
    ap.add_argument("--sigma", type=float, default=0.3)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=42)
    args = ap.parse_args()
    gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if gpu:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=5))
    set_seed(args.seed)

    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train = TensorDataset(x[:1440])
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=gpu)
    model = DDP(Denoiser().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (clean,) in loader:
            clean = clean.to(device)
            optimizer.zero_grad()
            F.mse_loss(model(corrupt(clean, args.sigma)), clean).backward()
            optimizer.step()
        mse = evaluate(model.module, x[1440:], args.sigma, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mse {mse:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
