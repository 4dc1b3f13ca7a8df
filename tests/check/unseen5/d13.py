# Digits playground: 5-view TTA, mixup, label smoothing. torchrun --nproc-per-node 2 d13.py
import csv
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class CFG:
    seed = 1337
    epochs = 3
    bs = 32
    lr = 4e-3
    mixup = 0.2
    out = "./out/d13"


class DigitSet(Dataset):
    def __init__(self, x, y=None):
        self.x, self.y = torch.tensor(x / 16.0, dtype=torch.float32).unsqueeze(1), y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return (self.x[i], int(self.y[i])) if self.y is not None else self.x[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.SiLU(),
            nn.Conv2d(24, 48, 3, padding=1, stride=2), nn.GroupNorm(4, 48), nn.SiLU(),
            nn.Conv2d(48, 48, 3, padding=1), nn.SiLU())
        self.fc = nn.Linear(48 * 16, 10)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


def tta(model, x):
    views = [x] + [torch.roll(x, s, d) for s, d in ((1, 2), (-1, 2), (1, 3), (-1, 3))]
    w = [0.6, 0.1, 0.1, 0.1, 0.1]
    return sum(a * model(v).softmax(1) for a, v in zip(w, views))


def train_one_epoch(model, loader, opt, sched, rng):
    model.train()
    for x, y in loader:
        lam = float(rng.beta(CFG.mixup, CFG.mixup))
        perm = torch.from_numpy(rng.permutation(len(y)))
        out = model(lam * x + (1 - lam) * x[perm])
        loss = (lam * F.cross_entropy(out, y, label_smoothing=0.05)
                + (1 - lam) * F.cross_entropy(out, y[perm], label_smoothing=0.05))
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    n = torch.zeros(2)
    for x, y in loader:
        n += torch.tensor([(tta(model, x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(n)
    return (n[0] / n[1]).item()


@torch.no_grad()
def predict(model, loader, total):
    model.eval()
    probs = torch.cat([tta(model, x) for x in loader])
    parts = [torch.zeros_like(probs) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, probs)
    return torch.cat(parts)[:total]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(CFG.seed)
    rng = np.random.default_rng(CFG.seed + rank)

    d = load_digits()
    ids = np.arange(len(d.target))
    tr, te = train_test_split(ids, test_size=300, random_state=CFG.seed, stratify=d.target)
    tr, va = train_test_split(tr, test_size=200, random_state=CFG.seed, stratify=d.target[tr])
    train_set, valid_set, test_set = DigitSet(d.images[tr], d.target[tr]), DigitSet(d.images[va], d.target[va]), DigitSet(d.images[te])

    sampler = DistributedSampler(train_set, shuffle=True, seed=CFG.seed)
    train_loader = DataLoader(train_set, CFG.bs, sampler=sampler, drop_last=True)
    valid_loader = DataLoader(valid_set, 50, sampler=DistributedSampler(valid_set, shuffle=False))
    test_loader = DataLoader(test_set, 50, sampler=DistributedSampler(test_set, shuffle=False))

    model = DDP(Net())
    opt = torch.optim.AdamW(model.parameters(), lr=CFG.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, CFG.lr, epochs=CFG.epochs, steps_per_epoch=len(train_loader))

    for epoch in range(CFG.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, train_loader, opt, sched, rng)
        acc = validate(model.module, valid_loader)
        if rank == 0:
            print(f"[{epoch}] valid acc {acc:.4f}", flush=True)

    probs = predict(model.module, test_loader, len(test_set))
    if rank == 0:
        os.makedirs(CFG.out, exist_ok=True)
        torch.save(model.module.state_dict(), f"{CFG.out}/model.pt")
        with open(f"{CFG.out}/submission.csv", "w", newline="") as f:
            w = csv.writer(f)
            w.writerow(["image_id", "label"])
            w.writerows(zip(te.tolist(), probs.argmax(1).tolist()))
        print("wrote", len(probs), "rows")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
