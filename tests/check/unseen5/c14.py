"""Playground-series style binary target: train, score the hold-out fold, write the submission."""
import csv
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_classification
from sklearn.metrics import log_loss, roc_auc_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class CFG:
    seed = 101
    epochs = 3
    batch_size = 48
    lr = 3e-3
    out = "./out/c14"


class TabDataset(Dataset):
    def __init__(self, x, y=None):
        self.x = torch.tensor(x, dtype=torch.float32)
        self.y = None if y is None else torch.tensor(y, dtype=torch.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] if self.y is None else (self.x[i], self.y[i])


def read_data():
    x, y = make_classification(3000, 20, n_informative=9, n_redundant=4, flip_y=0.05, random_state=CFG.seed)
    mu, sd = x[:2000].mean(0), x[:2000].std(0)
    x = (x - mu) / sd
    ids = np.arange(500000, 500600)
    return (x[:2000], y[:2000]), (x[2000:2400], y[2000:2400]), (x[2400:], ids)


class Net(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(d, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.15),
            nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


def gather(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def train_one_epoch(model, loader, opt, criterion):
    model.train()
    total = 0.0
    for x, y in loader:
        opt.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        opt.step()
        total += loss.item()
    return gather(torch.tensor([total / len(loader)])).mean().item()


@torch.no_grad()
def valid_one_epoch(model, loader):
    model.eval()
    preds, targets = [], []
    for x, y in loader:
        preds.append(model(x).sigmoid())
        targets.append(y)
    return gather(torch.cat(preds)).numpy(), gather(torch.cat(targets)).numpy()


@torch.no_grad()
def inference(model, loader):
    model.eval()
    preds = [model(x).sigmoid() for x in loader]
    return gather(torch.cat(preds)).numpy()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(CFG.seed + rank)
    (xt, yt), (xv, yv), (xs, ids) = read_data()
    train_ds, valid_ds, test_ds = TabDataset(xt, yt), TabDataset(xv, yv), TabDataset(xs)
    train_sampler = DistributedSampler(train_ds, shuffle=True, seed=CFG.seed)
    train_loader = DataLoader(train_ds, CFG.batch_size, sampler=train_sampler)
    valid_loader = DataLoader(valid_ds, 100, sampler=DistributedSampler(valid_ds, shuffle=False))
    test_loader = DataLoader(test_ds, 100, sampler=DistributedSampler(test_ds, shuffle=False))

    model = DDP(Net(xt.shape[1]))
    opt = torch.optim.AdamW(model.parameters(), lr=CFG.lr, weight_decay=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(CFG.epochs):
        train_sampler.set_epoch(epoch)
        tr = train_one_epoch(model, train_loader, opt, criterion)
        preds, targets = valid_one_epoch(model, valid_loader)
        if rank == 0:
            print(f"Epoch {epoch + 1} - train {tr:.4f} - logloss {log_loss(targets, preds):.4f} "
                  f"- AUC {roc_auc_score(targets, preds):.4f}", flush=True)

    test_preds = inference(model, test_loader)
    if rank == 0:
        os.makedirs(CFG.out, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(CFG.out, "model.pth"))
        with open(os.path.join(CFG.out, "submission.csv"), "w", newline="") as f:
            w = csv.writer(f)
            w.writerow(["id", "target"])
            w.writerows(zip(ids.tolist(), test_preds.round(6).tolist()))
        print("wrote", len(test_preds), "rows")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
