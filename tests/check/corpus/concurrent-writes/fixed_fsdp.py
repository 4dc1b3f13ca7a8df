"""FSDP2: full checkpoint on rank 0 after every epoch."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def synthetic(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, :4].prod(1) + x[:, 4])[:, None])


def save(model, optimizer, epoch, path):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    model_state, optim_state = get_state_dict(model, optimizer, options=options)  # gathers: all ranks
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"model": model_state, "optimizer": optim_state, "epoch": epoch, "rng": rng}, path)
    dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", default="runs/fsdp/model.pt")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (world,))
    model = Net().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    train, val = synthetic(1024, 1), synthetic(200, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler, num_workers=1, pin_memory=gpu)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        with torch.no_grad():
            x, y = (t[rank::world].to(device) for t in val.tensors)
            sums = torch.stack([F.mse_loss(model(x), y, reduction="sum"), torch.tensor(float(len(y)), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.4f}", flush=True)
        save(model, optimizer, epoch, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
