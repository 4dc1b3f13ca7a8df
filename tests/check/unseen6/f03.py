"""Load forecasting: GRU on synthetic hourly series, lr halved when the validation error stops falling."""
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

CFG = dict(epochs=4, batch=24, window=36, horizon=6, lr=2e-2, val_every=7, hidden=32)


class LoadCurves(Dataset):
    """Sum of a daily and a weekly rhythm plus autoregressive noise; one random cut per index."""

    def __init__(self, n, seed, window, horizon):
        g = torch.Generator().manual_seed(seed)
        length = window + horizon
        t = torch.arange(length).float()
        phase = torch.rand(n, 2, generator=g) * 2 * math.pi
        amp = 0.5 + torch.rand(n, 2, generator=g)
        daily = amp[:, :1] * torch.sin(2 * math.pi * t / 24 + phase[:, :1])
        weekly = amp[:, 1:] * torch.sin(2 * math.pi * t / 168 + phase[:, 1:])
        eps = 0.25 * torch.randn(n, length, generator=g)
        noise = torch.zeros(n, length)
        for i in range(1, length):
            noise[:, i] = 0.7 * noise[:, i - 1] + eps[:, i]
        self.series = daily + weekly + noise
        self.window = window

    def __len__(self):
        return len(self.series)

    def __getitem__(self, i):
        s = self.series[i]
        return s[: self.window, None], s[self.window:]


class Forecaster(nn.Module):
    def __init__(self, hidden, horizon):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, x):
        _, h = self.rnn(x)
        return self.head(h[-1]) + x[:, -1]


@torch.no_grad()
def validate(net, loader):
    net.eval()
    stats = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        err = (net(x) - y) ** 2
        stats[0] += err.sum().double()
        stats[1] += err.numel()
    dist.reduce(stats, dst=0, op=dist.ReduceOp.SUM)
    net.train()
    return (stats[0] / stats[1]).item()


def run():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.set_num_threads(1)
    out = Path("out/f03")
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)

    train = LoadCurves(1344, 0, CFG["window"], CFG["horizon"])
    valid = LoadCurves(300, 1, CFG["window"], CFG["horizon"])
    sampler = DistributedSampler(train, shuffle=True, seed=7)
    train_loader = DataLoader(train, batch_size=CFG["batch"], sampler=sampler)
    valid_loader = DataLoader(Subset(valid, range(rank, len(valid), world)), batch_size=75)

    torch.manual_seed(42)
    net = DDP(Forecaster(CFG["hidden"], CFG["horizon"]))
    opt = torch.optim.Adam(net.parameters(), lr=CFG["lr"])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=1e-3)

    best, step = float("inf"), 0
    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            step += 1
            if step % CFG["val_every"] == 0:
                mse = validate(net.module, valid_loader)
                plateau.step(mse)
                if rank == 0:
                    print(f"step {step:4d}  val mse {mse:.4f}  lr {opt.param_groups[0]['lr']:.2e}", flush=True)
                    if mse < best:
                        best = mse
                        torch.save(net.module.state_dict(), out / "best.pt")
    if rank == 0:
        print(f"best validation rmse {math.sqrt(best):.4f}, saved in {os.fspath(out)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
