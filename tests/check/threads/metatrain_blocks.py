import os
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MetricAccumulator:
    def __init__(self):
        self.information = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))

    def update(self, predictions, targets, species):
        for s in species.unique().tolist():
            mask = species == s
            error = (predictions[mask] - targets[mask]).pow(2).sum().item()
            self.information[s] += torch.tensor([error, float(mask.sum())], dtype=torch.float64)

    def finalize(self):
        result = {}
        for s in sorted(self.information):
            dist.all_reduce(self.information[s])
            result[s] = (self.information[s][0] / self.information[s][1]).sqrt().item()
        return result


def atoms(n, seed):
    g = torch.Generator().manual_seed(seed)
    species = torch.where(torch.rand(n, generator=g) < 0.99, torch.randint(0, 3, (n,), generator=g), 3)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, species, x[:, 0] * species + x[:, 1])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.species = nn.Embedding(4, 8)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x, species):
        return self.net(torch.cat([x, self.species(species)], 1)).squeeze(1)


def main():
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    train, val = atoms(960, 1), atoms(61, 4)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 48 // world, sampler=sampler, num_workers=1, pin_memory=cuda)
    model = DDP(Model().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, species, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x.to(device), species.to(device)), y.to(device)).backward()
            optimizer.step()
        accumulator = MetricAccumulator()
        with torch.no_grad():
            x, species, y = (t[rank::world] for t in val.tensors)
            accumulator.update(model.module(x.to(device), species.to(device)).cpu(), y, species)
        rmse = accumulator.finalize()
        if rank == 0:
            print(f"epoch {epoch}: " + ", ".join(f"species {s}: {e:.3f}" for s, e in rmse.items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
