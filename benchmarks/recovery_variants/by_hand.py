"""The recovery benchmark's job as a plain DDP script for torchrun: torch.save on rank 0 at the end of each epoch."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from jobs import BATCH, EPOCH_STEPS, STEPS, made_up_data, network
from torch.nn.parallel import DistributedDataParallel

folder = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
model = network()
parallel = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
path, first = f"{folder}/checkpoint.pt", 0
if os.path.exists(path):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
x, y = made_up_data()
with open(f"{folder}/rank-{rank}.jsonl", "a", buffering=1) as log:
    log.write(json.dumps({"event": "start", "pid": os.getpid(), "time": time.time(), "first": first}) + "\n")
    for step in range(first, STEPS):
        rows = torch.arange(step * BATCH + rank, (step + 1) * BATCH, size) % len(x)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(x[rows]), y[rows]).backward()
        optimizer.step()
        log.write(json.dumps({"event": "step", "step": step + 1, "time": time.time()}) + "\n")
        if (step + 1) % EPOCH_STEPS == 0 and rank == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, path + ".new"
            )
            os.replace(path + ".new", path)  # else a kill during the save would leave half of one
