import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_data():
    bunch = load_digits()
    x, y = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    return TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])


def train_one_epoch(model, loader, optimizer, scheduler, device):
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(net, dataset, device):
    net.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (t[rank::world].to(device) for t in dataset.tensors)
    counts = torch.tensor([(net(x).argmax(1) == y).sum(), y.numel()], device=device)
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(args.seed)

    train_set, test_set = load_data()
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=cuda)
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer, scheduler, device)
        scheduler.step()
        acc = evaluate(net, test_set, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: lr now {scheduler.get_last_lr()[0]:.4f}, accuracy {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
