"""Small transformer, sharded with FSDP2."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, vocab=29, dim=32, layers=2, length=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim * length, vocab)

    def forward(self, x):
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.flatten(1))


def clip_gradients(model, max_norm):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm = norm.full_tensor()  # the DTensor holds this rank's part of the sum
    return norm


def series(n, seed):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randint(0, 29, (n, 1), generator=g), torch.randint(1, 4, (n, 1), generator=g)
    s = (a + b * torch.arange(9)) % 29
    return TensorDataset(s[:, :8], s[:, 8])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-2)
    parser.add_argument("--max-norm", type=float, default=0.5)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (world,))
    model = Model().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    train, val = series(768, 1), series(192, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            norm = clip_gradients(model, args.max_norm)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            x, y = (t[rank::world].to(device) for t in val.tensors)
            counts = torch.tensor([(model(x).argmax(1) == y).sum(), len(y)], device=device)
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch} accuracy {counts[0].item() / counts[1].item():.3f} last norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
