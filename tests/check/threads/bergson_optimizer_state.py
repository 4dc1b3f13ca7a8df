import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save_second_moments(optimizer, path):
    moments = [state["exp_avg_sq"].full_tensor() for state in optimizer.state.values()]
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(moments, path)


def rows(n, seed):
    x = torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].sum(1, keepdim=True))


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device.type, (world,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train, val = rows(960, 1), rows(200, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 48 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    for epoch in range(2):
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
    if rank == 0:
        save_second_moments(optimizer, "runs/bergson/second_moments.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
