"""Compress a digits classifier: train a wide teacher, store its logits once, fit a small student on them.

torchrun --nproc_per_node 2 h01.py
"""
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

OUT = "out/h01"
SEED = 11
T = 3.0
ALPHA = 0.5


class Digits(Dataset):
    def __init__(self, x, y):
        self.x = torch.tensor(x / 16.0, dtype=torch.float32)
        self.y = torch.tensor(y, dtype=torch.long)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


def mlp(width, drop):
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Dropout(drop),
        nn.Linear(width, width), nn.ReLU(), nn.Dropout(drop),
        nn.Linear(width, 10),
    )


def kd_loss(student_logits, teacher_logits):
    p = F.log_softmax(student_logits / T, dim=-1)
    q = F.softmax(teacher_logits / T, dim=-1)
    return F.kl_div(p, q, reduction="batchmean") * T * T


def fit(model, dataset, epochs, lr, bank=None):
    sampler = DistributedSampler(dataset, shuffle=True, seed=SEED, drop_last=True)
    loader = DataLoader(dataset, batch_size=24, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros(2)
        for x, y, idx in loader:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            if bank is not None:
                loss = (1 - ALPHA) * loss + ALPHA * kd_loss(logits, bank[idx])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            running += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(running)
        if dist.get_rank() == 0:
            print(f"  epoch {epoch} loss {running[0] / running[1]:.4f}", flush=True)


@torch.no_grad()
def collect_logits(teacher, dataset):
    teacher.eval()
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=120, sampler=sampler)
    mine = torch.cat([teacher.module(x) for x, _, _ in loader])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts, dim=0)


@torch.no_grad()
def accuracy(model, dataset):
    model.eval()
    r, w = dist.get_rank(), dist.get_world_size()
    x, y = dataset.x[r::w], dataset.y[r::w]
    hits = (model.module(x).argmax(-1) == y).sum()
    stats = torch.stack([hits, torch.tensor(len(y))])
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, y = load_digits(return_X_y=True)
    x_tr, x_te, y_tr, y_te = train_test_split(x, y, test_size=357, random_state=SEED, stratify=y)
    train, test = Digits(x_tr, y_tr), Digits(x_te, y_te)

    torch.manual_seed(SEED)
    teacher = DDP(mlp(256, 0.2))
    student = DDP(mlp(24, 0.0))
    torch.manual_seed(SEED + 1 + rank)

    fit(teacher, train, epochs=4, lr=2e-3)
    teacher_acc = accuracy(teacher, test)
    bank = collect_logits(teacher, train)
    assert len(bank) == len(train)

    fit(student, train, epochs=4, lr=4e-3, bank=bank)
    student_acc = accuracy(student, test)

    if rank == 0:
        os.makedirs(OUT, exist_ok=True)
        torch.save(student.module.state_dict(), f"{OUT}/student.pt")
        with open(f"{OUT}/result.json", "w") as f:
            json.dump({"teacher": teacher_acc, "student": student_acc}, f)
        print(f"teacher {teacher_acc:.3f}  student {student_acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
