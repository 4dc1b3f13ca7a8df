"""Imbalanced click prediction (synthetic) with embeddings, AUC on the validation split."""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Clicks(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.user = rng.integers(0, 40, n)
        self.item = rng.integers(0, 60, n)
        self.dense = rng.normal(size=(n, 6)).astype(np.float32)
        affinity = np.sin(self.user * 0.7) * np.cos(self.item * 0.3) * 2
        logit = affinity + self.dense[:, 0] - 0.5 * self.dense[:, 1] - 2.5
        self.label = (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(np.float32)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.user[i], self.item[i], self.dense[i], self.label[i]


class CTR(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.u = nn.Embedding(40, d)
        self.i = nn.Embedding(60, d)
        self.mlp = nn.Sequential(nn.Linear(2 * d + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i, x):
        return self.mlp(torch.cat([self.u(u), self.i(i), x], dim=1)).squeeze(1)


def evaluate(model, loader, device):
    model.eval()
    scores, labels = [], []
    with torch.no_grad():
        for u, i, x, y in loader:
            scores.append(model(u.to(device), i.to(device), x.to(device)).sigmoid().cpu())
            labels.append(y)
    auc = roc_auc_score(torch.cat(labels).numpy(), torch.cat(scores).numpy())
    auc = torch.tensor(auc, dtype=torch.float32, device=device)
    dist.all_reduce(auc, op=dist.ReduceOp.SUM)
    return (auc / dist.get_world_size()).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(local_rank)

    train, val = Clicks(3200, 0), Clicks(500, 1)
    sampler = DistributedSampler(train, shuffle=True)
    train_loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 128)

    torch.manual_seed(0)
    net = CTR().to(device)
    model = DDP(net, device_ids=[local_rank] if cuda else None)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for u, i, x, y in train_loader:
            u, i, x, y = u.to(device), i.to(device), x.to(device), y.to(device)
            loss = bce(model(u, i, x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        auc = evaluate(net, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: val auc {auc:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
