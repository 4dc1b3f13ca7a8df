"""A training in two parts: the second continues from the first one's checkpoint."""
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATH = "runs/last.pt"


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def restore(net, optimizer, device):
    state = torch.load(PATH, map_location=device)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def part(until, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = rows(768, 1), rows(200, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32 // world, sampler=sampler, num_workers=1, pin_memory=device.type == "cuda")
    net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    first = restore(net, optimizer, device) if os.path.exists(PATH) else 0
    model = DDP(net, gradient_as_bucket_view=True)
    for epoch in range(first, until):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        x, y = (t[rank::world].to(device) for t in val.tensors)
        with torch.no_grad():
            sums = torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(len(y), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} accuracy {(sums[0] / sums[1]).item():.4f}", flush=True)
            os.makedirs("runs", exist_ok=True)
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, PATH)
        dist.barrier()


def main():
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    for until in (1, 2):
        part(until, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
