"""Digits classifier; validation runs on all GPUs."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Subset
from torch.utils.data.distributed import DistributedSampler


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=48)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=3)
    return p.parse_args()


def data():
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x.astype("float32") / 16, y, test_size=357, random_state=0, stratify=y)
    x_tr, x_va, y_tr, y_va = [torch.from_numpy(p) for p in parts]
    return TensorDataset(x_tr, y_tr), TensorDataset(x_va, y_va)


def make_loader(ds, bs, train, seed, pin):
    sampler = DistributedSampler(ds, shuffle=True, seed=seed) if train else None
    if not train:
        ds = Subset(ds, range(dist.get_rank(), len(ds), dist.get_world_size()))
    return DataLoader(ds, batch_size=bs, sampler=sampler, drop_last=train, num_workers=1, pin_memory=pin)


class AverageMeter:
    def __init__(self, device):
        self.sum_count = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, total, n):
        self.sum_count[0] += total
        self.sum_count[1] += n

    def synchronize(self):
        dist.all_reduce(self.sum_count)
        return (self.sum_count[0] / self.sum_count[1]).item()


def train_one_epoch(model, loader, opt, loss_fn, device):
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        opt.zero_grad()
        loss_fn(model(x), y).backward()
        opt.step()


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    meter = AverageMeter(device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        meter.update((model.module(x).argmax(1) == y).sum(), len(y))
    return meter.synchronize()


if __name__ == "__main__":
    args = parse()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=10))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(args.seed)

    train_ds, val_ds = data()
    train_loader = make_loader(train_ds, args.batch_size // dist.get_world_size(), True, args.seed, cuda)
    val_loader = make_loader(val_ds, 64, False, args.seed, cuda)
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 10)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        train_one_epoch(model, train_loader, opt, nn.CrossEntropyLoss(), device)
        acc = validate(model, val_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch={epoch} top1={acc:.4%}")
    dist.destroy_process_group()
