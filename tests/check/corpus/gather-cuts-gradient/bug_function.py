"""Contrastive pre-training: each rank's rows against the rows of all ranks."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GatherLayer(torch.autograd.Function):
    """all_gather inside a loss."""

    @staticmethod
    def forward(ctx, z):
        gathered = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, z)
        return tuple(gathered)

    @staticmethod
    def backward(ctx, *grads):
        return grads[dist.get_rank()].contiguous()


def gather_features(z):
    gathered = GatherLayer.apply(z)
    return torch.cat(gathered)


def info_nce(z1, z2, temperature=0.2):
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    labels = torch.arange(len(z1), device=z1.device) + dist.get_rank() * len(z1)
    one, other = z1 @ gather_features(z2).T / temperature, z2 @ gather_features(z1).T / temperature
    return (F.cross_entropy(one, labels) + F.cross_entropy(other, labels)) / 2


class Encoder(nn.Module):
    def __init__(self, dim=64, out=32):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim, 96), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, out))

    def forward(self, x):
        return self.projector(self.backbone(x))


def augment(x):
    return x * (torch.rand_like(x) > 0.15) + 0.05 * torch.randn_like(x)


@torch.no_grad()
def knn_accuracy(net, x_train, y_train, x_test, y_test, device):
    r, w = dist.get_rank(), dist.get_world_size()
    keys = F.normalize(net.backbone(x_train.to(device)), dim=1)
    queries = F.normalize(net.backbone(x_test[r::w].to(device)), dim=1)
    pred = y_train.to(device)[(queries @ keys.T).argmax(1)]
    counts = torch.tensor([(pred.cpu() == y_test[r::w]).sum(), len(y_test[r::w])], device=device)
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train = TensorDataset(x[:1440])
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=cuda, drop_last=True)
    model = DDP(Encoder().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(1000 + dist.get_rank())  # augmentations differ between ranks
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (images,) in loader:
            images = images.to(device)
            optimizer.zero_grad()
            z1, z2 = model(torch.cat([augment(images), augment(images)])).chunk(2)
            info_nce(z1, z2).backward()
            optimizer.step()
        acc = knn_accuracy(model.module, x[:1440], y[:1440], x[1440:], y[1440:], device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} knn accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
