"""Seasonal demand forecasting, restartable, with early stopping."""
import glob
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OUT = "./out/c13"
HIST, MAX_EPOCHS, PATIENCE, MIN_DELTA = 28, 4, 2, 1e-3


def demand():
    g = torch.Generator().manual_seed(0)
    t = torch.arange(260, dtype=torch.float32)
    xs, ys = [], []
    for _ in range(12):
        amp, phase = 0.5 + torch.rand(2, generator=g)
        s = amp * torch.sin(2 * torch.pi * t / 7 + 6 * phase) + 0.004 * t + 0.1 * torch.randn(260, generator=g)
        w = s.unfold(0, HIST + 1, 2)
        xs.append(w[:, :HIST])
        ys.append(w[:, HIST])
    cut = 92
    pick = lambda parts, sl: torch.cat([p[sl] for p in parts])
    tr, va = slice(0, cut), slice(cut + HIST // 2, None)
    return TensorDataset(pick(xs, tr), pick(ys, tr)), (pick(xs, va), pick(ys, va))


class Session:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(50)
        self.net = nn.Sequential(nn.Linear(HIST, 48), nn.GELU(), nn.Dropout(0.05), nn.Linear(48, 1), nn.Flatten(0))
        self.model = DDP(self.net)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, step_size=1, gamma=0.7)
        torch.manual_seed(50 + self.rank)
        self.train, self.valid = demand()
        self.sampler = DistributedSampler(self.train, seed=50)
        self.loader = DataLoader(self.train, batch_size=24, sampler=self.sampler)
        self.epoch, self.best, self.bad = 0, float("inf"), 0

    def state_path(self):
        return os.path.join(OUT, "state.pt")

    def save(self):
        torch.save(torch.get_rng_state(), os.path.join(OUT, f"rng_{self.rank}.pt"))
        if self.rank == 0:
            torch.save({
                "net": self.net.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
                "epoch": self.epoch, "best": self.best, "bad": self.bad,
            }, self.state_path())
        dist.barrier()

    def restore(self):
        s = torch.load(self.state_path(), map_location="cpu")
        self.net.load_state_dict(s["net"])
        self.opt.load_state_dict(s["opt"])
        self.sched.load_state_dict(s["sched"])
        self.epoch, self.best, self.bad = s["epoch"], s["best"], s["bad"]
        torch.set_rng_state(torch.load(os.path.join(OUT, f"rng_{self.rank}.pt")))

    def check(self):
        decision = [None]
        if self.rank == 0:
            self.net.eval()
            with torch.no_grad():
                mse = nn.functional.mse_loss(self.net(self.valid[0]), self.valid[1]).item()
            self.net.train()
            improved = mse < self.best - MIN_DELTA
            if improved:
                torch.save(self.net.state_dict(), os.path.join(OUT, "best.pt"))
            best, bad = (mse, 0) if improved else (self.best, self.bad + 1)
            print(f"epoch {self.epoch} val mse {mse:.4f} best {best:.4f} bad {bad}", flush=True)
            decision = [(best, bad)]
        dist.broadcast_object_list(decision, src=0)
        self.best, self.bad = decision[0]
        return self.bad >= PATIENCE

    def fit(self, until):
        while self.epoch < until:
            self.sampler.set_epoch(self.epoch)
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            self.sched.step()
            stop = self.check()
            self.epoch += 1
            self.save()
            if stop:
                break


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        shutil.rmtree(OUT, ignore_errors=True)
        os.makedirs(OUT)
    dist.barrier()

    first = Session()
    first.fit(until=2)
    del first

    second = Session()
    second.restore()
    second.fit(until=MAX_EPOCHS)
    if dist.get_rank() == 0:
        print("files:", sorted(os.path.basename(p) for p in glob.glob(OUT + "/*")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
