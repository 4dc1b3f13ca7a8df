import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def noisy_xor(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = ((x[:, 0] * x[:, 1] + 0.8 * torch.randn(n, generator=g)) > 0).float()
    return TensorDataset(x, y)


class Runner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        torch.manual_seed(args.seed)
        train, val = noisy_xor(640, 1), noisy_xor(97, 2)
        self.sampler = DistributedSampler(train, seed=args.seed)
        self.train_loader = DataLoader(train, args.batch_size // self.world, sampler=self.sampler, num_workers=1, pin_memory=cuda, persistent_workers=True)
        shard = Subset(val, range(self.rank, len(val), self.world))
        self.val_loader = DataLoader(shard, 64, num_workers=1, pin_memory=cuda, persistent_workers=True)
        net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.model = DDP(net.to(self.device), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.scheduler = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        self.criterion = nn.BCEWithLogitsLoss(reduction="sum")

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x.to(self.device)).squeeze(-1), y.to(self.device)) / len(y)
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        sums = torch.zeros(2, device=self.device)
        for x, y in self.val_loader:
            sums[0] += self.criterion(self.model.module(x.to(self.device)).squeeze(-1), y.to(self.device))
            sums[1] += len(y)
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def fit(self):
        for epoch in range(self.args.epochs):
            self.train_epoch(epoch)
            val_loss = self.validate()
            self.scheduler.step(val_loss)
            if self.rank == 0:
                print(f"epoch {epoch} val loss {val_loss:.4f} lr {self.optimizer.param_groups[0]['lr']:.2e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    Runner(args).fit()
    dist.destroy_process_group()
