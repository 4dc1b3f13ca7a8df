"""Tumour classification (Wisconsin table): DDP training, model chosen by validation AUC."""
import json
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OUT = "out/q13"
EPOCHS = 4
BATCH = 16


def log(*msg):
    if dist.get_rank() == 0:
        print(*msg, file=sys.stderr, flush=True)


def load():
    x, y = load_breast_cancer(return_X_y=True)
    x_tr, x_va, y_tr, y_va = train_test_split(x, y, test_size=168, stratify=y, random_state=8)
    sc = StandardScaler().fit(x_tr)
    as_set = lambda a, b: TensorDataset(torch.tensor(sc.transform(a)).float(), torch.tensor(b).float())
    return as_set(x_tr, y_tr), as_set(x_va, y_va)


class Gated(nn.Module):
    def __init__(self, n_in=30, width=32):
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(n_in, n_in), nn.Sigmoid())
        self.body = nn.Sequential(nn.Linear(n_in, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.body(x * self.gate(x))).squeeze(1)


def gather_rows(t):
    slots = [torch.zeros_like(t)] * dist.get_world_size()
    dist.all_gather(slots, t.contiguous())
    return torch.cat(slots)


@torch.no_grad()
def validate(net, loader):
    net.eval()
    score, truth = [], []
    for x, y in loader:
        score.append(net(x).sigmoid())
        truth.append(y)
    score, truth = gather_rows(torch.cat(score)), gather_rows(torch.cat(truth))
    net.train()
    return {
        "auc": float(roc_auc_score(truth.numpy(), score.numpy())),
        "ap": float(average_precision_score(truth.numpy(), score.numpy())),
        "brier": float(((score - truth) ** 2).mean()),
    }


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(2)

    train, val = load()
    world, rank = dist.get_world_size(), dist.get_rank()
    assert len(val) % world == 0
    sampler = DistributedSampler(train, shuffle=True, seed=2, drop_last=True)
    train_loader = DataLoader(train, BATCH, sampler=sampler)
    val_loader = DataLoader(val, 28, sampler=DistributedSampler(val, shuffle=False))

    net = DDP(Gated())
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=EPOCHS * len(train_loader), power=0.9)
    weight = torch.tensor(0.6)  # benign is the majority class
    criterion = nn.BCEWithLogitsLoss(pos_weight=weight)

    history, best = [], -1.0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            opt.zero_grad()
            criterion(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()
            sched.step()
        m = validate(net.module, val_loader)
        history.append({"epoch": epoch, **m})
        log(f"epoch {epoch}: AUC {m['auc']:.4f} AP {m['ap']:.4f} Brier {m['brier']:.4f}")
        if m["auc"] > best:
            best = m["auc"]
            if rank == 0:
                os.makedirs(OUT, exist_ok=True)
                torch.save({"epoch": epoch, "net": net.module.state_dict()}, f"{OUT}/best.pt")

    if rank == 0:
        with open(f"{OUT}/history.json", "w") as f:
            json.dump({"best_auc": best, "history": history}, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
