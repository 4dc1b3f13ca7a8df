# torchrun --nproc-per-node=2 train.py
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_wine
from sklearn.preprocessing import scale
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def wine():
    x, y = load_wine(return_X_y=True)
    x = torch.tensor(scale(x), dtype=torch.float32)
    y = torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[:128], y[:128]), x[128:], y[128:]


def setup_device():
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timedelta(minutes=5), device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    return device


def train_epoch(model, loader, optimizer, loss_fn, device):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()


def evaluate(model, x, y, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    with torch.no_grad():
        correct = (model(x[rank::world].to(device)).argmax(1) == y[rank::world].to(device)).sum()
    counts = torch.stack([correct, torch.tensor(len(y[rank::world]), device=device)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", "--epochs", type=int, default=6)
    parser.add_argument("-b", "--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    device = setup_device()
    torch.manual_seed(0)
    train_set, x_test, y_test = wine()
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(
        train_set,
        batch_size=args.batch_size // dist.get_world_size(),
        sampler=sampler,
        num_workers=1,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )
    net = nn.Sequential(nn.Linear(13, 24), nn.Tanh(), nn.Linear(24, 3)).to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, nn.CrossEntropyLoss(), device)
        acc = evaluate(net, x_test, y_test, device)
        if dist.get_rank() == 0:
            print("epoch %d: test accuracy %.3f" % (epoch, acc))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
