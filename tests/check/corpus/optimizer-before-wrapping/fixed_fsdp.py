import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ResidualMLP(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.inp = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def prepare(args, device):
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train = TensorDataset(x[:1408], y[:1408])
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(
        train, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=device.type == "cuda"
    )
    return loader, x[1408:1796], y[1408:1796]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=10))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.manual_seed(args.seed)
    loader, x_test, y_test = prepare(args, device)

    model = ResidualMLP().to(device)
    model = shard(model, init_device_mesh(device.type, (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            model.zero_grad()
            criterion(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            pred = model(x_test[rank::world].to(device)).argmax(1)
        counts = torch.tensor([(pred.cpu() == y_test[rank::world]).sum(), len(pred)], device=device)
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch} accuracy {counts[0].item() / counts[1].item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
