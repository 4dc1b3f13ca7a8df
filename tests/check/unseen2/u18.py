"""Site-energy regression. Runs under srun or torchrun."""
import argparse
import logging
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class ClusterEnv:
    """Small shim over the launcher's environment variables."""

    def __init__(self):
        self.job = os.environ.get("SLURM_JOB_ID", "local")
        self.procid = int(os.environ.get("SLURM_PROCID", "0"))
        self.local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))

    def setup(self):
        dist.init_process_group("gloo")
        return self

    @property
    def is_main(self):
        return self.procid == 0


def build_dataset(n=700, d=14):
    g = torch.Generator().manual_seed(123)
    x = torch.rand(n, d, generator=g) * 2 - 1
    y = (x[:, 0] * x[:, 1] + x[:, 2:6].pow(2).sum(1) - x[:, 7]).unsqueeze(1)
    return TensorDataset(x, y + 0.02 * torch.randn(n, 1, generator=g))


class SaveManager:
    def __init__(self, env, folder, keep=2):
        self.env, self.folder, self.keep = env, folder, keep
        os.makedirs(folder, exist_ok=True)

    def _path(self, epoch):
        return os.path.join(self.folder, f"ckpt_{epoch:04d}.pt")

    def save(self, epoch, model, optimizer, scheduler, metrics):
        if self.env.is_main:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "metrics": metrics, "epoch": epoch,
                        "time": time.time()}, self._path(epoch))
        dist.barrier()

    def latest(self):
        names = sorted(f for f in os.listdir(self.folder) if f.startswith("ckpt_"))
        return os.path.join(self.folder, names[-1]) if names else None


def mlp(sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def evaluate(model, data):
    rank, world = dist.get_rank(), dist.get_world_size()
    part = Subset(data, range(rank, len(data), world))
    stats = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(part, 64):
            stats[0] += (model(x) - y).abs().sum().double()
            stats[1] += len(y)
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "site_energy"))
    args = parser.parse_args()

    env = ClusterEnv().setup()
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING,
                        format=f"[{env.job}] %(message)s")
    data = build_dataset()
    train, val = Subset(data, range(600)), Subset(data, range(600, 700))
    sampler = DistributedSampler(train, shuffle=True, seed=1)
    loader = DataLoader(train, args.batch_size, sampler=sampler)

    torch.manual_seed(2)
    model = DistributedDataParallel(mlp([14, 48, 48, 1]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3)
    saver = SaveManager(env, args.folder)
    start = 0
    if args.resume and saver.latest():
        state = torch.load(saver.latest(), map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["epoch"] + 1

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.huber_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        mae = evaluate(model.module, val)
        logging.info("epoch %d mae %.4f", epoch, mae)
        saver.save(epoch, model, optimizer, scheduler, {"mae": mae})
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
