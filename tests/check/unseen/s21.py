import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

N_RECORDS = 2560
W_TRUE = torch.linspace(-1, 1, 12)


def record(i, salt=0):
    g = torch.Generator().manual_seed(i * 7919 + salt)
    x = torch.randn(12, generator=g)
    return x, (x * W_TRUE).sum() + torch.sin(x[0]) + 0.05 * torch.randn((), generator=g)


class Stream(IterableDataset):
    """Reads a (synthetic) record file front to back; each reader keeps every n-th record."""

    def __init__(self, n, rank, world, salt=0, shuffle_seed=None):
        self.n, self.rank, self.world, self.salt = n, rank, world, salt
        self.shuffle_seed = shuffle_seed
        self.epoch = 0

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info is not None else (0, 1)
        reader, readers = self.rank * nw + wid, self.world * nw
        order = torch.arange(self.n)
        if self.shuffle_seed is not None:
            order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.shuffle_seed + self.epoch))
        for i in order[reader::readers].tolist():
            yield record(i, self.salt)


def run():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    dev = torch.device(f"cuda:{local}") if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)

    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(12, 64), nn.SiLU(), nn.Linear(64, 1)).to(dev)
    model = DDP(model, device_ids=[local] if cuda else None)
    optim = torch.optim.Adam(model.parameters(), lr=5e-3)

    train = Stream(N_RECORDS, rank, world, shuffle_seed=3)
    # workers are started anew at each iter(loader), so they see the current train.epoch
    loader = DataLoader(train, batch_size=32, num_workers=1, drop_last=True)
    val_loader = DataLoader(Stream(333, rank, world, salt=1), batch_size=64)

    # every rank must run the same number of steps
    readers = world * max(1, loader.num_workers)
    steps = (N_RECORDS // readers // 32) * max(1, loader.num_workers)

    for epoch in range(3):
        train.epoch = epoch
        model.train()
        for step, (x, y) in enumerate(loader):
            if step == steps:
                break
            x, y = x.to(dev), y.to(dev)
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            optim.zero_grad()
            loss.backward()
            optim.step()

        model.eval()
        sq = torch.zeros(2, dtype=torch.float64, device=dev)
        with torch.no_grad():
            for x, y in val_loader:
                x, y = x.to(dev), y.to(dev)
                sq[0] += ((model.module(x).squeeze(-1) - y) ** 2).sum()
                sq[1] += len(y)
        dist.all_reduce(sq)
        if rank == 0:
            print(f"epoch {epoch}: {steps} steps, val rmse {(sq[0] / sq[1]).sqrt().item():.4f} (n={int(sq[1])})", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    run()
