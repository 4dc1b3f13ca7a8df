"""Conv net with batch norm on digits."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def conv_bn(c_in, c_out):
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU())


class SmallResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv_bn(1, 16)
        self.block = conv_bn(16, 16)
        self.pool = nn.AvgPool2d(4)
        self.fc = nn.Linear(16 * 4, 10)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.block(x)
        return self.fc(self.pool(x).flatten(1))


@torch.no_grad()
def evaluate(net, loader, device):
    net.eval()
    counts = torch.zeros(2, device=device)
    for x, y in loader:
        counts[0] += (net(x.to(device)).argmax(1) == y.to(device)).sum()
        counts[1] += len(y)
    dist.all_reduce(counts)
    net.train()
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    d = load_digits()
    data = TensorDataset(torch.tensor(d.images, dtype=torch.float32)[:, None] / 16, torch.tensor(d.target))
    train, test = Subset(data, range(1408)), Subset(data, range(1408 + rank, len(data), world))
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    test_loader = DataLoader(test, 100, num_workers=1, pin_memory=cuda)
    net = SmallResNet().to(device)
    model = DDP(net, broadcast_buffers=False, gradient_as_bucket_view=True)  # faster
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        acc = evaluate(net, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
