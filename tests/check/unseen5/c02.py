"""Digits classifier for a queue with short time slots: train a slot, stop, pick up in the next."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3
SLOT_EPOCHS = (1, 3)
BATCH = 32
LR = 2e-3
CKPT = os.path.join("./out", "c02", "last.pt")


def get_data():
    x, y = load_digits(return_X_y=True)
    xt, xv, yt, yv = train_test_split(x / 16.0, y, test_size=357, random_state=0, stratify=y)

    def as_ds(a, b):
        return TensorDataset(torch.tensor(a, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(b))

    return as_ds(xt, yt), as_ds(xv, yv)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, 32)
        self.fc = nn.Linear(32 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


@torch.no_grad()
def validate(net, ds, rank, world):
    net.eval()
    idx = torch.arange(len(ds))[rank::world]
    x, y = ds.tensors[0][idx], ds.tensors[1][idx]
    out = net(x)
    stat = torch.stack([
        F.cross_entropy(out, y, reduction="sum"),
        (out.argmax(1) == y).sum().float(),
        torch.tensor(float(len(y))),
    ])
    dist.all_reduce(stat)
    net.train()
    return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item()


def save_checkpoint(path, net, opt, epoch):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd, tmp = tempfile.mkstemp(dir=os.path.dirname(path))
    os.close(fd)
    torch.save({"model": net.state_dict(), "optim": opt.state_dict(), "epoch": epoch}, tmp)
    os.replace(tmp, path)


def run_slot(slot, stop_epoch, rank, world):
    torch.manual_seed(11)
    train_ds, val_ds = get_data()
    sampler = DistributedSampler(train_ds, world, rank, seed=11)
    loader = DataLoader(train_ds, batch_size=BATCH, sampler=sampler)

    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=LR)
    start = torch.zeros(1, dtype=torch.long)
    if slot > 0 and rank == 0:
        ckpt = torch.load(CKPT, map_location="cpu")
        net.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["optim"])
        start.fill_(ckpt["epoch"] + 1)
    dist.broadcast(start, src=0)
    start = int(start.item())

    model = DDP(net)
    for epoch in range(start, stop_epoch):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        val_loss, val_acc = validate(model.module, val_ds, rank, world)
        if rank == 0:
            print(f"[slot {slot}] epoch {epoch + 1}/{EPOCHS} val_loss {val_loss:.4f} val_acc {val_acc:.4f}", flush=True)
            save_checkpoint(CKPT, model.module, opt, epoch)
        dist.barrier()


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for slot, stop_epoch in enumerate(SLOT_EPOCHS):
        run_slot(slot, stop_epoch, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
