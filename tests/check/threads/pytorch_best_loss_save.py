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

PATH = "runs/best/best.pt"


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, x[:, :1] + torch.randn(n, 1, generator=g))


def validation(model, val, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        x, y = (t[rank::world].to(device) for t in val.tensors)
        sums = torch.stack([F.mse_loss(model(x), y, reduction="sum"), torch.tensor(float(len(y)), device=device)])
    dist.reduce(sums, 0, op=dist.ReduceOp.SUM)
    return (sums[0] / sums[1]).item()


def save(model, optimizer, epoch):
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(PATH), exist_ok=True)
        torch.save({"model": model_state, "optimizer": optim_state, "epoch": epoch, "rng": rng}, PATH)


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 1)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, val = rows(320, 1), rows(40, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32 // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=cuda)
    best = float("inf")
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        val_loss = validation(model, val, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: val loss {val_loss:.4f}", flush=True)
        if val_loss < best:
            best = val_loss
            save(model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
