"""Conditional VAE, FSDP2 sharding, config-driven assembly."""
import argparse
import logging
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEFAULTS = dict(dim=20, hidden=64, latent=6, classes=4, epochs=3, batch=16, lr=2e-3, wd=1e-3, beta=0.1, sharding="full")


class CVAE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.cond = nn.Embedding(c.classes, 8)
        self.enc = nn.Sequential(nn.Linear(c.dim + 8, c.hidden), nn.ReLU(), nn.Linear(c.hidden, 2 * c.latent))
        self.dec = nn.Sequential(nn.Linear(c.latent + 8, c.hidden), nn.ReLU(), nn.Linear(c.hidden, c.dim))

    def forward(self, x, y):
        e = self.cond(y)
        mu, logvar = self.enc(torch.cat([x, e], 1)).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(torch.cat([z, e], 1)), mu, logvar


def elbo(x, rec, mu, logvar, beta):
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return F.mse_loss(rec, x, reduction="none").sum(1).mean() + beta * kl


def param_groups(model, wd):
    plain = [p for p in model.parameters() if p.ndim < 2]
    matrix = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": matrix, "weight_decay": wd}, {"params": plain, "weight_decay": 0.0}]


class Assembly:
    """Creates everything a run needs from a flat config."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(10)
        self.model = CVAE(cfg)
        self.optimizer = torch.optim.AdamW(param_groups(self.model, cfg.wd), lr=cfg.lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, cfg.epochs)
        self.distribute()
        self.train_loader, self.sampler = self.loader(512, 1, True)
        self.val_loader, _ = self.loader(128, 2, False)
        torch.manual_seed(1000 + self.rank)

    def distribute(self):
        if self.cfg.sharding == "none":
            return
        mesh = init_device_mesh("cpu", (self.world,))
        if self.cfg.sharding == "full":
            fully_shard(self.model.enc, mesh=mesh)
            fully_shard(self.model.dec, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def loader(self, n, seed, shuffle):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(self.cfg.classes, self.cfg.dim, generator=torch.Generator().manual_seed(0))
        y = torch.randint(0, self.cfg.classes, (n,), generator=g)
        data = TensorDataset(proto[y] + 0.5 * torch.randn(n, self.cfg.dim, generator=g), y)
        sampler = DistributedSampler(data, self.world, self.rank, shuffle=shuffle)
        return DataLoader(data, self.cfg.batch, sampler=sampler), sampler


def mean_over_ranks(total, count):
    t = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(t)
    return (t[0] / t[1]).item()


def run_epoch(a, loader, train):
    a.model.train(train)
    total = count = 0
    for x, y in loader:
        with torch.set_grad_enabled(train):
            loss = elbo(x, *a.model(x, y), a.cfg.beta)
        if train:
            a.optimizer.zero_grad()
            loss.backward()
            a.optimizer.step()
        total, count = total + loss.item() * len(x), count + len(x)
    return mean_over_ranks(total, count)


def main():
    ap = argparse.ArgumentParser()
    for k, v in DEFAULTS.items():
        ap.add_argument(f"--{k}", type=type(v), default=v)
    cfg = SimpleNamespace(**vars(ap.parse_args()))
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.ERROR, format="%(message)s")
    a = Assembly(cfg)
    for epoch in range(cfg.epochs):
        a.sampler.set_epoch(epoch)
        tr = run_epoch(a, a.train_loader, True)
        va = run_epoch(a, a.val_loader, False)
        a.scheduler.step()
        logging.info("epoch %d elbo train %.3f val %.3f lr %.2e", epoch, tr, va, a.scheduler.get_last_lr()[0])
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
