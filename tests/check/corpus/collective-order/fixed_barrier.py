"""Digits; rank 0 writes a checkpoint, the others wait."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save(model, optimizer, epoch, rng, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "rng": rng}
    torch.save(state, path)


def gather_rng():
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    return states


def accuracy(net, x, y):
    with torch.no_grad():
        counts = torch.tensor([(net(x).argmax(1) == y).sum(), len(y)], device=x.device)
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", default="runs/digits/last.pt")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_set = TensorDataset(x[:1440], y[:1440])
    sampler = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    x_val, y_val = x[1440 + rank :: world].to(device), y[1440 + rank :: world].to(device)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        rng = gather_rng()
        acc = accuracy(net, x_val, y_val)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {acc:.3f}", flush=True)
            save(model, optimizer, epoch, rng, args.out)
        dist.barrier()  # nobody goes on before the file is complete
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
