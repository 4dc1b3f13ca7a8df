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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 16, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


def train(model, device, loader, optimizer, epoch, log_interval):
    model.train()
    running_loss = 0.0
    running_correct = 0
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        running_correct += (out.argmax(1) == y).sum().item()
        print(f"rank {dist.get_rank()} epoch {epoch} step {i} loss {loss.item():.4f}")
    totals = torch.tensor([running_loss / len(loader), running_correct / len(loader.sampler)], device=device)
    dist.all_reduce(totals)
    return (totals / dist.get_world_size()).tolist()


@torch.no_grad()
def evaluate(net, device, loader):
    net.eval()
    counts = torch.zeros(2, device=device)
    for x, y in loader:
        counts[0] += (net(x.to(device)).argmax(1) == y.to(device)).sum()
        counts[1] += len(y)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=72)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--log-interval", type=int, default=10)
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
    data = TensorDataset(torch.tensor(d.images, dtype=torch.float32)[:, None] / 16, torch.tensor(d.target))
    train_set, test_set = Subset(data, range(1440)), Subset(data, range(1440 + rank, len(data), world))
    sampler = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=100)
    model = DDP(Net().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss, train_acc = train(model, device, loader, optimizer, epoch, args.log_interval)
        acc = evaluate(model.module, device, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, train accuracy {train_acc:.3f}, test accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
