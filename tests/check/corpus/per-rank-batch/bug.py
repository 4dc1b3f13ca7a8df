"""
Reproduces the reference recipe: SGD, batch size 64, lr 0.05, 3 epochs.
    torchrun --nproc_per_node=2 reference.py
"""
import os
from argparse import ArgumentParser
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def init_distributed():
    if torch.cuda.is_available():
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", timeout=timedelta(minutes=5))
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    return torch.device("cpu")


def get_args():
    p = ArgumentParser()
    p.add_argument("--batch-size", type=int, default=64, help="the batch size of the paper")
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--num-workers", type=int, default=1)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def digits_split(start, stop):
    d = load_digits()
    return TensorDataset(torch.tensor(d.data[start:stop], dtype=torch.float32) / 16, torch.tensor(d.target[start:stop]))


class Trainer:
    def __init__(self, model, loader, optimizer, device):
        self.model, self.loader, self.optimizer, self.device = model, loader, optimizer, device
        self.criterion = nn.CrossEntropyLoss()

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        self.model.train()
        for xb, yb in self.loader:
            xb, yb = xb.to(self.device), yb.to(self.device)
            self.optimizer.zero_grad()
            self.criterion(self.model(xb), yb).backward()
            self.optimizer.step()

    @torch.no_grad()
    def accuracy(self, dataset):
        self.model.eval()
        rank, world = dist.get_rank(), dist.get_world_size()
        x, y = (t[rank::world].to(self.device) for t in dataset.tensors)
        counts = torch.tensor([(self.model.module(x).argmax(1) == y).sum(), len(y)], device=self.device)
        dist.all_reduce(counts)
        return counts[0].item() / counts[1].item()


def main():
    args = get_args()
    device = init_distributed()
    torch.manual_seed(args.seed)
    train, test = digits_split(0, 1408), digits_split(1408, None)
    loader = DataLoader(
        train,
        batch_size=args.batch_size,
        sampler=DistributedSampler(train, shuffle=True, seed=args.seed),
        num_workers=args.num_workers,
        pin_memory=device.type == "cuda",
    )
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    trainer = Trainer(model, loader, optim.SGD(model.parameters(), lr=args.lr, momentum=0.9), device)
    for epoch in range(args.epochs):
        trainer.run_epoch(epoch)
        acc = trainer.accuracy(test)
        if dist.get_rank() == 0:
            print(f"{epoch=} {acc=:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
