"""Own sharding of a shuffled index list, without DistributedSampler."""
import argparse
import os
import random
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ShardedShuffle(Sampler):
    """Shuffles all indices, then every rank takes its slice."""

    def __init__(self, dataset, rank, world_size, seed):
        self.n, self.rank, self.world_size = len(dataset) // world_size * world_size, rank, world_size
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n // self.world_size

    def __iter__(self):
        indices = list(range(self.n))
        random.shuffle(indices)
        return iter(indices[self.rank : self.n : self.world_size])


def digits():
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    return TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])


@torch.no_grad()
def evaluate(net, dataset, device):
    net.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (t[rank::world].to(device) for t in dataset.tensors)
    counts = torch.tensor([(net(x).argmax(1) == y).sum(), len(y)], device=device)
    dist.all_reduce(counts)
    net.train()
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=72)
    parser.add_argument("--lr", type=float, default=0.1)
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

    train, test = digits()
    sampler = ShardedShuffle(train, rank, world, args.seed)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        accuracy = evaluate(net, test, device)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
