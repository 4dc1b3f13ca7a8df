"""
Multi-horizon forecasting with a small MLP-mixer, parameters and optimizer sharded by fully_shard.
The cluster hands out short jobs, so a run is a chain of jobs that pick up out/forecast/last.pt.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CHANNELS, PAST, FUTURE = 6, 32, 8


def make_series(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(PAST + FUTURE).float()
    freq = 0.1 + 0.5 * torch.rand(n, CHANNELS, 1, generator=g)
    phase = 6.28 * torch.rand(n, CHANNELS, 1, generator=g)
    trend = 0.05 * torch.randn(n, CHANNELS, 1, generator=g)
    s = torch.sin(freq * t + phase) + trend * t + 0.1 * torch.randn(n, CHANNELS, len(t), generator=g)
    return TensorDataset(s[..., :PAST], s[..., PAST:])


class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.channel = nn.Linear(CHANNELS, CHANNELS)
        self.time = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.channel(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.time(self.n2(x))


class Forecaster(nn.Module):
    def __init__(self, dim=64, depth=3):
        super().__init__()
        self.embed = nn.Linear(PAST, dim)
        self.blocks = nn.ModuleList(Mixer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, FUTURE)

    def forward(self, x):
        x = self.embed(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    s = torch.zeros(2)
    for past, future in loader:
        s += torch.tensor([F.mse_loss(model(past), future, reduction="sum").item(), float(future.numel())])
    dist.all_reduce(s)
    model.train()
    return (s[0] / s[1]).item()


class Job:
    def __init__(self, args):
        self.args, self.rank = args, dist.get_rank()
        self.path = os.path.join(args.out, "last.pt")
        torch.manual_seed(args.seed)
        self.model = Forecaster()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for b in self.model.blocks:
            fully_shard(b, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)
        self.train_set, self.val_set = make_series(1024, 0), make_series(256, 1)
        self.sampler = DistributedSampler(self.train_set, shuffle=True, seed=args.seed)
        self.loader = DataLoader(self.train_set, batch_size=args.batch_size, sampler=self.sampler)
        self.val_loader = DataLoader(self.val_set, 64, sampler=DistributedSampler(self.val_set, shuffle=False))
        self.epoch = 0

    def save(self):
        weights = get_model_state_dict(
            self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank == 0:
            os.makedirs(self.args.out, exist_ok=True)
            state = {"model": weights, "optimizer": self.opt.state_dict(), "epoch": self.epoch}
            torch.save(state, self.path + ".tmp")
            os.replace(self.path + ".tmp", self.path)
        dist.barrier()

    def load(self):
        state = torch.load(self.path, map_location="cpu", weights_only=False)
        set_model_state_dict(self.model, state["model"], options=StateDictOptions(full_state_dict=True))
        self.opt.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]

    def run(self, until):
        while self.epoch < until:
            self.sampler.set_epoch(self.epoch)
            for past, future in self.loader:
                loss = F.mse_loss(self.model(past), future)
                self.opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
            self.epoch += 1
            mse = evaluate(self.model, self.val_loader)
            if self.rank == 0:
                print(f"epoch {self.epoch} val mse {mse:.4f}", flush=True)
            self.save()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--epochs_per_job", type=int, default=2)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=17)
    ap.add_argument("--out", default="out/forecast")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    start = 0
    while start < args.epochs:
        job = Job(args)
        if start > 0:
            job.load()
            if job.rank == 0:
                print(f"continuing from epoch {job.epoch}", flush=True)
        job.run(until=min(start + args.epochs_per_job, args.epochs))
        start = job.epoch
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
