"""Training with hard-example selection: after the first epoch only the fraction
of samples with the largest last-seen loss is visited."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


@dataclass
class Config:
    n_train: int = 1600
    n_val: int = 400
    dim: int = 24
    classes: int = 5
    epochs: int = 3
    batch_size: int = 32
    keep: float = 0.6
    lr: float = 2e-3
    seed: int = 21
    out: str = "./out/e05"


class Blobs(Dataset):
    def __init__(self, n, cfg, seed):
        g = torch.Generator().manual_seed(seed)
        centers = torch.randn(cfg.classes, cfg.dim, generator=torch.Generator().manual_seed(1234))
        self.y = torch.randint(0, cfg.classes, (n,), generator=g)
        self.x = centers[self.y] + 1.8 * torch.randn(n, cfg.dim, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


class HardExampleSampler(Sampler):
    def __init__(self, n, keep, rank, world, seed, warmup_epochs=1):
        self.n, self.keep, self.rank, self.world = n, keep, rank, world
        self.seed, self.warmup_epochs, self.epoch = seed, warmup_epochs, 0
        self.losses = torch.zeros(n)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def update(self, idx, losses):
        self.losses[idx] = losses.detach()

    def _count(self):
        k = self.n if self.epoch < self.warmup_epochs else int(self.keep * self.n)
        return k - k % self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        chosen = torch.argsort(self.losses, descending=True, stable=True)[: self._count()]
        chosen = chosen[torch.randperm(len(chosen), generator=g)]
        return iter(chosen[self.rank :: self.world].tolist())

    def __len__(self):
        return self._count() // self.world


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    stats = torch.zeros(2)
    for _, x, y in loader:
        stats += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[1]).item()


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)

    train_set = Blobs(cfg.n_train, cfg, seed=1)
    val_set = Blobs(cfg.n_val, cfg, seed=2)
    sampler = HardExampleSampler(len(train_set), cfg.keep, rank, world, cfg.seed)
    train_loader = DataLoader(train_set, cfg.batch_size, sampler=sampler, drop_last=True)
    val_idx = range(rank, len(val_set), world)
    val_loader = DataLoader(torch.utils.data.Subset(val_set, val_idx), 100)

    model = DDP(nn.Sequential(nn.Linear(cfg.dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                              nn.Linear(64, cfg.classes)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for idx, x, y in train_loader:
            per_sample = F.cross_entropy(model(x), y, reduction="none")
            optimizer.zero_grad(set_to_none=True)
            per_sample.mean().backward()
            optimizer.step()
            sampler.update(idx, per_sample)
            total += torch.tensor([per_sample.sum().item(), len(y)])
        dist.all_reduce(total)
        acc = evaluate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: visited {int(total[1])} loss {total[0] / total[1]:.4f} val_acc {acc:.4f}")

    if rank == 0:
        os.makedirs(cfg.out, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(cfg.out, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
