"""Molecule property regression with guarded steps (the raw measurements contain outliers)."""
import argparse
import logging
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("mol")


class Molecules(Dataset):
    def __init__(self, n, seed, atoms=10, feats=7):
        g = torch.Generator().manual_seed(seed)
        self.atoms = torch.randn(n, atoms, feats, generator=g)
        self.mask = torch.rand(n, atoms, generator=g) < 0.8
        self.mask[:, 0] = True
        contrib = self.atoms[..., 0] * self.atoms[..., 1] + 0.5 * self.atoms[..., 2].abs()
        self.y = (contrib * self.mask).sum(1) / 3

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.atoms[i], self.mask[i], self.y[i]


class DeepSets(nn.Module):
    def __init__(self, feats=7, dim=32):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(feats, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU())
        self.rho = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 2))

    def forward(self, atoms, mask):
        pooled = (self.phi(atoms) * mask.unsqueeze(-1)).sum(1)
        mean, logvar = self.rho(pooled).unbind(-1)
        return mean, logvar.clamp(-6, 6)


def nll(mean, logvar, y):
    return 0.5 * (logvar + (y - mean) ** 2 / logvar.exp()).mean()


class GuardedTrainer:
    def __init__(self, model, opt, sched, max_norm=5.0):
        self.model, self.opt, self.sched = model, opt, sched
        self.max_norm = max_norm
        self.skipped = 0

    def usable(self, loss, limit=1e4):
        return torch.isfinite(loss).item() and loss.item() < limit

    def epoch(self, loader):
        self.model.train()
        total, n = 0.0, 0
        for atoms, mask, y in loader:
            self.opt.zero_grad(set_to_none=True)
            mean, logvar = self.model(atoms, mask)
            loss = nll(mean, logvar, y)
            if not self.usable(loss):
                self.skipped += 1
                log.warning("skipping batch, loss=%s", loss.item())
                continue
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.opt.step()
            self.sched.step()
            total, n = total + loss.item() * len(y), n + len(y)
        t = torch.tensor([total, n, self.skipped], dtype=torch.float64)
        dist.all_reduce(t)
        return (t[0] / t[1]).item(), int(t[2])

    @torch.no_grad()
    def mae(self, data, rank, world):
        self.model.eval()
        sub = torch.utils.data.Subset(data, range(rank, len(data), world))
        s = torch.zeros(2)
        for atoms, mask, y in DataLoader(sub, 50):
            mean, _ = self.model.module(atoms, mask)
            s += torch.tensor([(mean - y).abs().sum().item(), len(y)])
        dist.all_reduce(s)
        return (s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=20)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--ckpt", default=os.path.join(tempfile.gettempdir(), "deepsets.pt"))
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format=f"r{rank} %(message)s")
    torch.manual_seed(1)

    train, val = Molecules(600, 1), Molecules(140, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=2)
    loader = DataLoader(train, a.batch, sampler=sampler)
    model = DDP(DeepSets())
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs * len(loader))
    trainer = GuardedTrainer(model, opt, sched)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        loss, skipped = trainer.epoch(loader)
        log.info("epoch %d nll %.4f val mae %.4f skipped %d", epoch, loss, trainer.mae(val, rank, world), skipped)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, a.ckpt)
        dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
