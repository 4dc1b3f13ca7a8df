import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def diabetes():
    x, y = load_diabetes(return_X_y=True, scaled=True)
    x, y = torch.tensor(x, dtype=torch.float32) * 20, torch.tensor(y, dtype=torch.float32)[:, None]
    y = (y - y.mean()) / y.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


class Regressor(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.inp = nn.Linear(10, width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        x = x + torch.relu(self.hidden(x))
        return self.out(x)


def wrap(model, device):
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def validate(model, x, y, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    with torch.no_grad():
        x, y = x[rank::world].to(device), y[rank::world].to(device)
        sums = torch.tensor([nn.functional.mse_loss(model(x), y, reduction="sum"), len(y)], device=device)
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if gpu:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(args.seed)

    x, y = diabetes()
    train_set = TensorDataset(x[:352], y[:352])
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=gpu)
    net = Regressor().to(device)
    model = wrap(net, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(xb.to(device)), yb.to(device)).backward()
            optimizer.step()
        mse = validate(net, x[352:], y[352:], device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mse {mse:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
