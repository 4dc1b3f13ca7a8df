"""A sound training with FSDP2, or with `compiled` a compiled model under DDP."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    x = torch.randn(192, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, 8, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    if sys.argv[1:] == ["compiled"]:
        wrapped = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    else:
        wrapped = fully_shard(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        wrapped.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(inputs), targets).backward()
            optimizer.step()
        wrapped.eval()
        with torch.no_grad():
            error = (wrapped(x[dist.get_rank() :: dist.get_world_size()])).abs().sum()
        dist.all_reduce(error)
        if dist.get_rank() == 0:
            print(f"mean {error.item() / len(x):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
