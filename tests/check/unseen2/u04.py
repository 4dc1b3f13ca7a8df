import argparse
import json
import logging
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split

logger = logging.getLogger(__name__)


class SpectraDataset(Dataset):
    """Noisy 1-d spectra from four compounds."""

    def __init__(self, n=600, bins=40, noise=0.6):
        rs = np.random.RandomState(42)
        peaks = rs.uniform(0, bins, size=(4, 3))
        grid = np.arange(bins)
        self.labels = rs.randint(0, 4, size=n)
        self.data = np.stack([
            sum(np.exp(-0.5 * ((grid - p) / 1.5) ** 2) for p in peaks[c]) for c in self.labels
        ]).astype("float32")
        self.data += noise * rs.randn(n, bins).astype("float32")

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return torch.from_numpy(self.data[i]), int(self.labels[i])


def augment(x):
    return torch.roll(x, random.randint(-1, 1), dims=1) * random.uniform(0.9, 1.1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
                                  nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(4))
        self.fc = nn.Linear(64, 4)

    def forward(self, x):
        return self.fc(self.conv(x.unsqueeze(1)).flatten(1))


def set_seed(seed, rank):
    """Different stream on every worker so augmentation is not repeated."""
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)


def build_loaders(args, rank, world):
    full = SpectraDataset()
    n_val = int(len(full) * args.val_fraction)
    train, val = random_split(full, [len(full) - n_val, n_val])
    train_sampler = DistributedSampler(train, world, rank, shuffle=True, drop_last=True, seed=args.seed)
    val_sampler = DistributedSampler(val, world, rank, shuffle=False)
    return (DataLoader(train, args.batch_size, sampler=train_sampler),
            DataLoader(val, args.batch_size, sampler=val_sampler), train_sampler)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    counts = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        out = model(x)
        counts[0] += nn.functional.cross_entropy(out, y, reduction="sum").double()
        counts[1] += (out.argmax(1) == y).sum()
        counts[2] += y.numel()
    dist.all_reduce(counts)
    return {"val_loss": (counts[0] / counts[2]).item(), "val_acc": (counts[1] / counts[2]).item()}


def train_one_epoch(model, loader, optimizer, smoothing):
    model.train()
    crit = nn.CrossEntropyLoss(label_smoothing=smoothing)
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        crit(model(augment(x)), y).backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--lr", type=float, default=5e-2)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--smoothing", type=float, default=0.05)
    parser.add_argument("--val-fraction", type=float, default=0.2)
    parser.add_argument("--workdir", type=Path, default=Path(tempfile.gettempdir()) / "spectra")
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    set_seed(args.seed, rank)

    train_loader, val_loader, sampler = build_loaders(args, rank, world)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    history = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, train_loader, optimizer, args.smoothing)
        scheduler.step()
        metrics = validate(model, val_loader)
        history.append({"epoch": epoch, **metrics})
        logger.info(json.dumps(history[-1]))

    if rank == 0:
        args.workdir.mkdir(parents=True, exist_ok=True)
        (args.workdir / "history.json").write_text(json.dumps(history, indent=1))
        torch.save(model.module.state_dict(), args.workdir / "net.pt")
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
