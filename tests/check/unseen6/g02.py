# Metric learning on the 8x8 digits: an embedding net trained against one learned
# anchor per class (proxy-NCA flavour), classified at test time by the closest anchor.
import argparse
import os

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import distributed as dist, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Embedder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, dim),
        )

    def forward(self, x):
        return F.normalize(self.features(x), dim=-1)


class ProxyLoss(nn.Module):
    def __init__(self, n_classes, dim, temperature=0.15):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(n_classes, dim))
        self.temperature = temperature

    def scores(self, emb):
        return emb @ F.normalize(self.proxies, dim=-1).t() / self.temperature

    def forward(self, emb, target):
        return F.cross_entropy(self.scores(emb), target)


def build_loaders(batch_size):
    x, y = load_digits(return_X_y=True)
    x = (x.astype(np.float32) / 16.0).reshape(-1, 1, 8, 8)
    xtr, xte, ytr, yte = train_test_split(x, y, test_size=360, random_state=11, stratify=y)
    train = TensorDataset(torch.from_numpy(xtr), torch.from_numpy(ytr))
    test = TensorDataset(torch.from_numpy(xte), torch.from_numpy(yte))
    sampler = DistributedSampler(train, shuffle=True, seed=5, drop_last=True)
    train_dl = DataLoader(train, batch_size=batch_size, sampler=sampler, drop_last=True)
    test_dl = DataLoader(test, batch_size=60, sampler=DistributedSampler(test, shuffle=False))
    return train_dl, test_dl


def test_accuracy(embedder, criterion, loader):
    embedder.eval()
    hits = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            hits[0] += (criterion.scores(embedder(x)).argmax(-1) == y).sum()
            hits[1] += len(y)
    embedder.train()
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--dim", type=int, default=24)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--proxy-lr", type=float, default=2e-2)
    args = ap.parse_args()

    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)

    embedder = DistributedDataParallel(Embedder(args.dim))
    criterion = ProxyLoss(10, args.dim)
    optimizer = torch.optim.Adam(
        [
            {"params": embedder.parameters(), "lr": args.lr},
            {"params": criterion.parameters(), "lr": args.proxy_lr},
        ]
    )
    train_dl, test_dl = build_loaders(args.batch_size)

    for epoch in range(args.epochs):
        train_dl.sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for x, y in train_dl:
            loss = criterion(embedder(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        acc = test_accuracy(embedder.module, criterion, test_dl)
        if rank == 0:
            print(f"[{epoch}] loss={running[0] / running[1]:.4f} acc={acc:.4f}")

    if rank == 0:
        os.makedirs("out/g02", exist_ok=True)
        torch.save(
            {"embedder": embedder.module.state_dict(), "proxies": criterion.state_dict(), "acc": acc},
            "out/g02/model.pt",
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
