"""Classification of leaves by their names."""
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, x[:, :1].tanh() + 0.1 * torch.randn(n, 1, generator=g))


NAMES = ["ash", "beech", "birch", "elm", "fir", "larch", "oak", "pine"]


class Leaves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        kinds = torch.randint(0, len(NAMES), (n,), generator=g)
        self.x = torch.randn(n, 16, generator=g) + kinds[:, None] / 2
        self.names = [NAMES[kind] for kind in kinds]
        kinds = set(self.names)
        self.ids = {name: number for number, name in enumerate(kinds)}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.ids[self.names[index]]


def main():
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train = Leaves(640, 1)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    model = DDP(nn.Linear(16, len(NAMES)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
