"""Data parallel by hand, as in the PyTorch tutorial, for a model that DDP does not like."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def broadcast_parameters(model):
    for p in model.state_dict().values():
        dist.broadcast(p, src=0)


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= dist.get_world_size()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def run(args):
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)

    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train = TensorDataset(x[:1440], y[:1440])
    sampler = DistributedSampler(train, num_replicas=size, rank=rank, seed=1234)
    loader = DataLoader(train, args.batch_size // size, sampler=sampler, num_workers=1, pin_memory=cuda)
    test_x, test_y = x[1440:][rank::size].to(device), y[1440:][rank::size].to(device)

    model = Net().to(device)
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        epoch_loss = torch.zeros((), device=device)
        for data, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(data.to(device)), target.to(device))
            loss.backward()
            average_gradients(model)
            optimizer.step()
            epoch_loss += loss.detach()
        model.eval()
        with torch.no_grad():
            hits = (model(test_x).argmax(1) == test_y).sum()
        stats = torch.stack([hits.float(), torch.tensor(float(len(test_y)), device=device), epoch_loss])
        dist.all_reduce(stats)
        if rank == 0:
            hits, count, loss_sum = stats.tolist()
            print(f"epoch {epoch}: loss {loss_sum / (len(loader) * size):.4f}, accuracy {hits / count:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=72)
    parser.add_argument("--lr", type=float, default=0.1)
    run(parser.parse_args())
