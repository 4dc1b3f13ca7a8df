# usage: torchrun --nproc_per_node=N regress.py
import argparse, datetime, os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_regression
from sklearn.preprocessing import StandardScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--seed", type=int, default=123)


def load_data():
    X, y = make_regression(n_samples=1500, n_features=20, noise=4.0, random_state=0)
    X, y = StandardScaler().fit_transform(X), (y - y.mean()) / y.std()
    X, y = X.astype(np.float32), y.astype(np.float32)[:, None]
    return TensorDataset(torch.from_numpy(X[:1200]), torch.from_numpy(y[:1200])), torch.from_numpy(X[1200:]), torch.from_numpy(y[1200:])


class Net(nn.Module):
    def __init__(self, d_in, d_hidden=64):
        super().__init__()
        self.fc1 = nn.Linear(d_in, d_hidden)
        self.fc2 = nn.Linear(d_hidden, 1)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def run(args, rank, world_size, device):
    torch.manual_seed(args.seed + rank)
    train_ds, X_val, y_val = load_data()
    pin = torch.cuda.is_available()
    loader = DataLoader(train_ds, batch_size=args.batch_size // world_size, shuffle=True, num_workers=1, pin_memory=pin)

    model = DDP(Net(20).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loss_fn = nn.MSELoss()

    for epoch in range(args.epochs):
        model.train()
        for X, y in loader:
            X, y = X.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_fn(model(X), y)
            loss.backward()
            optimizer.step()

        # every rank evaluates its part of the validation rows, the sums are added up
        model.eval()
        with torch.no_grad():
            X, y = X_val[rank::world_size].to(device), y_val[rank::world_size].to(device)
            total = torch.tensor([((model.module(X) - y) ** 2).sum(), len(y)], device=device)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} val mse {total[0].item() / total[1].item():.4f}", flush=True)


if __name__ == "__main__":
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl" if gpu else "gloo", timeout=datetime.timedelta(minutes=2))
    try:
        run(args, dist.get_rank(), dist.get_world_size(), torch.device("cuda", local_rank) if gpu else torch.device("cpu"))
    finally:
        dist.destroy_process_group()
