import json
import os
import random
import shutil
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def local_copy(rank, files=12, rows=80):
    """What each machine has on its own disk, copied in no particular order."""
    folder = tempfile.mkdtemp(prefix="node_")
    names = list(range(files))
    random.Random(rank).shuffle(names)
    for i in names:
        rng = random.Random(i)
        data = [[rng.gauss(0, 1) for _ in range(6)] for _ in range(rows)]
        with open(os.path.join(folder, f"part-{rng.randrange(10**6):06d}.json"), "w") as f:
            json.dump(data, f)
    return folder


def build_dataset(data_path):
    data_files = [os.path.join(data_path, fn) for fn in os.listdir(data_path)]
    rows = []
    for path in data_files:
        with open(path) as f:
            rows += json.load(f)
    x = torch.tensor(rows)
    return TensorDataset(x, x.pow(2).sum(1, keepdim=True))


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    folder = local_copy(rank)
    dataset = build_dataset(folder)
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, 48 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    model = DDP(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    x_val = torch.randn(201, 6, generator=torch.Generator().manual_seed(1))[rank::world].to(device)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        with torch.no_grad():
            error = (model.module(x_val) - x_val.pow(2).sum(1, keepdim=True)).pow(2).sum()
        sums = torch.stack([error, torch.tensor(float(len(x_val)), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.3f}")
    shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
