"""CNN on 8x8 digits, gradient accumulation for a large batch."""
import argparse
import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU())
        self.out = nn.Linear(16 * 16, 10)

    def forward(self, x):
        return self.out(self.features(x).flatten(1))


class Engine:
    def __init__(self, args, device):
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        d = load_digits()
        full = TensorDataset(torch.tensor(d.images, dtype=torch.float32)[:, None] / 16, torch.tensor(d.target))
        train, val = Subset(full, range(1408)), Subset(full, range(1408 + self.rank, len(full), self.world))
        self.sampler = DistributedSampler(train, seed=args.seed)
        micro = args.batch_size // (args.accumulate * self.world)
        common = dict(num_workers=1, pin_memory=device.type == "cuda")
        self.train_loader = DataLoader(train, micro, sampler=self.sampler, **common)
        self.val_loader = DataLoader(val, 128, **common)
        self.model = DDP(Net().to(device), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.loss = nn.CrossEntropyLoss()

    def train(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for i, (x, y) in enumerate(self.train_loader):
            update = (i + 1) % self.args.accumulate == 0
            with nullcontext() if update else self.model.no_sync():
                loss = self.loss(self.model(x.to(self.device)), y.to(self.device)) / self.args.accumulate
                loss.backward()
            if update:
                self.optimizer.step()
                self.optimizer.zero_grad()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        counts = torch.zeros(2, device=self.device)
        for x, y in self.val_loader:
            hits = self.model.module(x.to(self.device)).argmax(1) == y.to(self.device)
            counts[0] += hits.sum()
            counts[1] += hits.numel()
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=64, help="samples per optimizer step, all processes together")
    p.add_argument("--accumulate", type=int, default=4)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(args.seed)
    engine = Engine(args, torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu"))
    for epoch in range(args.epochs):
        engine.train(epoch)
        acc = engine.validate()
        if engine.rank == 0:
            print(f"epoch {epoch} accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
