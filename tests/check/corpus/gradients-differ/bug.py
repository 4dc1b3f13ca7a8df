"""Multi-task learning with uncertainty weighting of the two losses."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SharedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.classify = nn.Linear(64, 3)
        self.regress = nn.Linear(64, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.classify(h), self.regress(h).squeeze(-1)


class UncertaintyLoss(nn.Module):
    """Learns one log-variance per task."""

    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, outputs, label, value):
        logits, pred = outputs
        losses = torch.stack([nn.functional.cross_entropy(logits, label), nn.functional.mse_loss(pred, value)])
        return (losses * torch.exp(-self.log_vars) + self.log_vars).sum()


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    value = x[:, 0] * x[:, 1] + 0.1 * torch.randn(n, generator=g)
    label = (x[:, 2] > 0.5).long() + (x[:, 3] > 0).long()
    return TensorDataset(x, label, value)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    train_set, val_set = make_data(1024, 1), make_data(203, 2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=0)
    loader = DataLoader(train_set, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=gpu)
    net, criterion = SharedNet().to(device), UncertaintyLoss().to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            x, label, value = (t.to(device) for t in batch)
            optimizer.zero_grad()
            loss = criterion(model(x), label, value)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            x, label, value = (t[rank::world].to(device) for t in val_set.tensors)
            logits, pred = net(x)
            sums = torch.tensor([(logits.argmax(1) == label).sum(), ((pred - value) ** 2).sum(), len(x)], device=device)
        dist.all_reduce(sums)
        if rank == 0:
            acc, mse = (sums[:2] / sums[2]).tolist()
            print(f"epoch {epoch} acc {acc:.3f} mse {mse:.3f} log_vars {criterion.log_vars.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
