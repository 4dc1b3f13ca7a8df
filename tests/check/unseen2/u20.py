"""Streaming training on 'files' with rank- and worker-aware assignment and a fixed step budget."""
import argparse
import math
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class FileStream(IterableDataset):
    def __init__(self, root, rank, world, seed=0, endless=True):
        self.files = sorted(os.path.join(root, f) for f in os.listdir(root) if f.endswith(".npy"))
        self.rank, self.world, self.seed, self.endless = rank, world, seed, endless

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        slot, slots = self.rank * nw + wid, self.world * nw
        epoch = 0
        while True:
            order = np.random.RandomState(self.seed + epoch).permutation(len(self.files))
            for k in order[slot::slots]:
                rows = np.load(self.files[k])
                for r in np.random.RandomState(self.seed + epoch + int(k)).permutation(len(rows)):
                    yield torch.from_numpy(rows[r, :-1]), torch.tensor(rows[r, -1])
            epoch += 1
            if not self.endless:
                return


def write_files(root, n_files, rows=48, d=9):
    os.makedirs(root, exist_ok=True)
    w = np.linspace(-1, 1, d)
    for i in range(n_files):
        rs = np.random.RandomState(i)
        x = rs.randn(rows, d)
        y = np.tanh(x @ w) + 0.05 * rs.randn(rows)
        np.save(os.path.join(root, f"part-{i:03d}.npy"), np.c_[x, y].astype("float32"))


class Net(nn.Module):
    def __init__(self, d=9):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(d, 32), nn.Mish(), nn.Linear(32, 32), nn.Mish(), nn.Linear(32, 1))

    def forward(self, x):
        return self.f(x).squeeze(-1)


def holdout_error(net, root, rank, world):
    s = torch.zeros(2)
    with torch.no_grad():
        for x, y in DataLoader(FileStream(root, rank, world, endless=False), 64):
            s[0] += (net(x) - y).pow(2).sum()
            s[1] += len(y)
    dist.all_reduce(s)
    return math.sqrt((s[0] / s[1]).item())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--eval-every", type=int, default=20)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--root", default=os.path.join(tempfile.gettempdir(), "stream_parts"))
    a = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_root, hold_root = os.path.join(a.root, "train"), os.path.join(a.root, "hold")
    if rank == 0:
        write_files(train_root, 9)
        write_files(hold_root, 3)
    dist.barrier()

    torch.manual_seed(6)
    model = DDP(Net())
    opt = optim.AdamW(model.parameters(), lr=a.lr)
    sched = optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=a.steps)
    it = iter(DataLoader(FileStream(train_root, rank, world, seed=4), a.batch, num_workers=a.workers))

    running = torch.zeros(())
    for step in range(1, a.steps + 1):
        x, y = next(it)
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        running += loss.detach() / a.eval_every
        if step % a.eval_every == 0:
            dist.all_reduce(running)
            rmse = holdout_error(model.module, hold_root, rank, world)
            if rank == 0:
                print(f"step {step} train mse {running.item() / world:.4f} holdout rmse {rmse:.4f}", flush=True)
            running.zero_()
    del it
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
