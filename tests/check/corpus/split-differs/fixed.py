import argparse
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split


class NoisySines(Dataset):
    """Classify the frequency of a noisy sine."""

    def __init__(self, n=1250, length=32, classes=4):
        rng = np.random.default_rng(0)
        self.y = rng.integers(classes, size=n)
        t = np.linspace(0, 2 * np.pi, length)
        phase = rng.uniform(0, 2 * np.pi, size=(n, 1))
        signal = np.sin((self.y[:, None] + 1) * t + phase)
        self.x = (signal + rng.normal(0, 0.7, signal.shape)).astype(np.float32)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


def seed_everything(seed):
    # a different seed on each process, otherwise dropout is the same everywhere
    seed = seed + dist.get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def val_metrics(model, loader, device):
    model.eval()
    acc = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            acc[0] += (model(x.to(device)).argmax(1).cpu() == y).sum()
            acc[1] += y.numel()
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main(args):
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=600))
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(args.seed)

    full = NoisySines()
    train_set, val_set = random_split(full, [1000, 250], generator=torch.Generator().manual_seed(args.seed))
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=device.type == "cuda")
    val_shard = torch.utils.data.Subset(val_set, range(rank, len(val_set), world))
    val_loader = DataLoader(val_shard, 64, num_workers=1, pin_memory=device.type == "cuda")

    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 4)).to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        acc = val_metrics(model.module, val_loader, device)
        if rank == 0:
            print(f"Epoch {epoch}  val acc {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    main(parser.parse_args())
