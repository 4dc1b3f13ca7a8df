import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __init__(self):
        data = load_digits()
        self.x = torch.tensor(data.data, dtype=torch.float32) / 16
        self.y = torch.tensor(data.target)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def is_main():
    return dist.get_rank() == 0


def train_epoch(model, loader, optimizer, device):
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def test(net, loader, device):
    net.eval()
    test_loss = torch.zeros((), device=device)
    correct = torch.zeros((), device=device)
    seen = torch.zeros((), device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        out = net(x)
        test_loss += F.cross_entropy(out, y, reduction="sum")
        correct += (out.argmax(1) == y).sum()
        seen += len(y)
    if is_main():
        print(f"Test set: average loss {test_loss / seen:.4f}, accuracy {100 * correct / seen:.2f}%")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=70)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(10)

    data = Digits()
    train_set = Subset(data, range(1400))
    test_set = Subset(data, range(1400 + dist.get_rank(), len(data), dist.get_world_size()))
    sampler = DistributedSampler(train_set, shuffle=True, seed=10)
    train_loader = DataLoader(train_set, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=on_gpu)
    test_loader = DataLoader(test_set, 64, num_workers=1, pin_memory=on_gpu)
    net = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 10)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, optimizer, device)
        test(net, test_loader, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
