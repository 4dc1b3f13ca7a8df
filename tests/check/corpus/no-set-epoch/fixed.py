"""Train a small MLP on the digits of scikit-learn with DistributedDataParallel.

    torchrun --nproc-per-node 2 train_digits.py --epochs 4
"""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def get_datasets():
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    y = torch.tensor(digits.target)
    return TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])


def setup():
    use_cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if use_cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(minutes=5))
    return torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    hits = torch.zeros(2, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        hits[0] += (model(x).argmax(1) == y).sum()
        hits[1] += len(y)
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="global batch size")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, test_set = get_datasets()
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    pin = device.type == "cuda"
    train_loader = DataLoader(train_set, batch_size=args.batch_size // world_size, sampler=sampler, num_workers=1, pin_memory=pin)
    shard = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(shard, batch_size=128, num_workers=1, pin_memory=pin)

    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DDP(net, device_ids=[device.index] if pin else None, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros((), device=device)
        for x, y in train_loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            running += loss.detach()
        accuracy = evaluate(model.module, test_loader, device)
        dist.all_reduce(running)
        if rank == 0:
            mean = running.item() / len(train_loader) / world_size
            print(f"epoch {epoch}: loss {mean:.4f} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
