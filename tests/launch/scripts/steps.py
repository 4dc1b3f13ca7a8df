"""Makes optimizer steps with DistributedDataParallel; with a second argument, runs out of memory after them."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
parallel = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
for batch in DataLoader(torch.randn(4 * int(sys.argv[1]), 8), batch_size=4):
    optimizer.zero_grad()
    parallel(batch).square().mean().backward()
    optimizer.step()
print("profile", "--profile" in sys.argv)
if "more" in sys.argv:
    torch.empty(2**48)
dist.destroy_process_group()
