"""Churn model: DDP training, AUC-selected checkpoint."""
import argparse
import csv
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.metrics import roc_auc_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Customers(Dataset):
    CATS = (7, 5, 3)

    def __init__(self, n, seed):
        rs = np.random.RandomState(seed)
        self.cat = np.stack([rs.randint(0, c, n) for c in self.CATS], 1)
        self.num = rs.randn(n, 6).astype("float32")
        effect = [np.random.RandomState(k).randn(c) for k, c in enumerate(self.CATS)]
        logit = sum(e[self.cat[:, k]] for k, e in enumerate(effect)) + self.num[:, 0] - 0.5 * self.num[:, 1]
        self.y = (rs.rand(n) < 1 / (1 + np.exp(-logit))).astype("float32")

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return torch.from_numpy(self.cat[i]), torch.from_numpy(self.num[i]), self.y[i]


class ChurnNet(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(c, dim) for c in Customers.CATS)
        self.mlp = nn.Sequential(nn.Linear(dim * len(Customers.CATS) + 6, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 1))

    def forward(self, cat, num):
        e = [emb(cat[:, k]) for k, emb in enumerate(self.embs)]
        return self.mlp(torch.cat(e + [num], 1)).squeeze(1)


class Evaluator:
    def __init__(self, loader):
        self.loader = loader

    @torch.no_grad()
    def __call__(self, model):
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        probs, targets = [], []
        for cat, num, y in self.loader:
            logit = model(cat, num)
            sums[0] += nn.functional.binary_cross_entropy_with_logits(logit, y, reduction="sum").double()
            sums[1] += len(y)
            probs.append(torch.sigmoid(logit))
            targets.append(y)
        dist.all_reduce(sums)
        probs, targets = torch.cat(probs).numpy(), torch.cat(targets).numpy()
        return {"logloss": (sums[0] / sums[1]).item(), "auc": roc_auc_score(targets, probs), "n": int(sums[1])}


def train_epoch(model, loader, opt, sched):
    model.train()
    for cat, num, y in loader:
        opt.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(cat, num), y).backward()
        opt.step()
        sched.step()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "churn"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(90 + rank)
    train, val = Customers(1024, 1), Customers(300, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True)
    loader = DataLoader(train, args.bs, sampler=sampler)
    evaluate = Evaluator(DataLoader(val, 50, sampler=DistributedSampler(val, world, rank, shuffle=False)))

    model = DDP(ChurnNet())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * len(loader))

    best, rows = 0.0, []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, opt, sched)
        m = evaluate(model)
        if rank == 0:
            os.makedirs(args.out, exist_ok=True)
            rows.append({"epoch": epoch, **m})
            print("epoch {epoch}: logloss {logloss:.4f} auc {auc:.4f} on {n} customers".format(**rows[-1]), flush=True)
            if m["auc"] > best:
                best = m["auc"]
                torch.save({"state": model.module.state_dict(), "auc": best}, os.path.join(args.out, "best.pt"))
        dist.barrier()

    if rank == 0:
        with open(os.path.join(args.out, "metrics.csv"), "w", newline="") as f:
            w = csv.DictWriter(f, fieldnames=list(rows[0]))
            w.writeheader()
            w.writerows(rows)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
