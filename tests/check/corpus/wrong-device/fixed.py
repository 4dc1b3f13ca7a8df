import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 3, padding=1)
        self.conv2 = nn.Conv2d(10, 20, 3, padding=1)
        self.fc = nn.Linear(20 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def get_loaders(batch_size):
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440 + rank :: world], y[1440 + rank :: world])
    kwargs = {"num_workers": 1, "pin_memory": torch.cuda.is_available()}
    sampler = DistributedSampler(train, seed=0)
    return DataLoader(train, batch_size // world, sampler=sampler, **kwargs), DataLoader(test, 100, **kwargs)


def train(model, loader, optimizer, epoch):
    loader.sampler.set_epoch(epoch)
    model.train()
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    correct = torch.zeros(2, device=device)
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            correct[0] += (model(images).argmax(1) == labels).sum()
            correct[1] += len(labels)
    dist.all_reduce(correct)
    return (correct[0] / correct[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    train_loader, test_loader = get_loaders(args.batch_size)
    model = CNN().to(device)
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        train(ddp_model, train_loader, optimizer, epoch)
        accuracy = test(model, test_loader)
        if dist.get_rank() == 0:
            print(f"Epoch {epoch + 1}: {accuracy:.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
