import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

METRICS = ["loss", "top1", "top3", "confidence", "count"]


def compute_metrics(logits, y):
    probs = logits.softmax(1)
    top3 = probs.topk(3).indices
    return {
        "loss": F.cross_entropy(logits, y, reduction="sum"),
        "top1": (top3[:, 0] == y).sum().float(),
        "top3": (top3 == y[:, None]).any(1).sum().float(),
        "confidence": probs.max(1).values.sum(),
        "count": torch.tensor(float(len(y)), device=y.device),
    }


def reduce_metrics(metrics):
    """Sum every metric over the ranks, then divide by the number of samples."""
    for name in METRICS:
        dist.all_reduce(metrics[name])
    count = metrics.pop("count")
    return {name: (value / count).item() for name, value in metrics.items()}


def train(model, loader, optimizer, device):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=72)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train_set = TensorDataset(x[:1440], y[:1440])
    sampler = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    x_test, y_test = x[1440 + rank :: world].to(device), y[1440 + rank :: world].to(device)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer, device)
        model.eval()
        with torch.no_grad():
            result = reduce_metrics(compute_metrics(model.module(x_test), y_test))
        if rank == 0:
            print(f"epoch {epoch}: " + ", ".join(f"{k} {v:.4f}" for k, v in sorted(result.items())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
