import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_grad_norm(grads):
    grads = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    total = torch.zeros((), device=grads[0].device)
    for g in grads:
        total += g.norm(2) ** 2
    return total.sqrt()


def clip_grad_by_total_norm(parameters, max_norm, total_norm):
    coefficient = max_norm / (total_norm + 1e-6)
    if coefficient < 1.0:
        for p in parameters:
            p.grad.to_local().mul_(coefficient)


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 24, generator=g)
    return TensorDataset(x, 4 * (x[:, :1] * x[:, 1:2]) + x[:, 2:3])


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device.type, (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    train, val = data(960, 1), data(200, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 48 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x.to(device)), y.to(device)).backward()
            norm = get_grad_norm([p.grad for p in model.parameters()])
            clip_grad_by_total_norm(model.parameters(), 0.5, norm)
            optimizer.step()
        with torch.no_grad():
            x, y = (t[rank::world].to(device) for t in val.tensors)
            sums = torch.stack([F.mse_loss(model(x), y, reduction="sum"), torch.tensor(float(len(y)), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.3f}, last norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
