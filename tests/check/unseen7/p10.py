"""Digit classifier trained in time slots; each slot picks up the checkpoint the previous one left."""
import logging
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("slots")
CKPT = Path("out/p10/last.pt")
TOTAL_EPOCHS, EPOCHS_PER_SLOT = 4, 2


def datasets():
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(d.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(8))
    tr, te = order[:1440], order[1440:1796]
    return TensorDataset(x[tr], y[tr]), TensorDataset(x[te], y[te])


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )


class Slot:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.train_set, self.test_set = datasets()
        torch.manual_seed(21)
        self.net = convnet()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=2e-3)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, gamma=0.8)
        self.epoch = 0
        self.restore()
        self.ddp = DDP(self.net)
        self.sampler = DistributedSampler(self.train_set, world, rank, shuffle=True, drop_last=True)
        self.loader = DataLoader(self.train_set, batch_size=30, sampler=self.sampler)

    def restore(self):
        if self.rank == 0 and CKPT.exists():
            state = torch.load(CKPT, map_location="cpu")
            self.net.load_state_dict(state["net"])
            self.opt.load_state_dict(state["opt"])
            self.epoch = state["epoch"]
        where = [self.epoch, self.sched.state_dict()]
        if self.rank == 0 and self.epoch:
            where[1] = state["sched"]
        dist.broadcast_object_list(where, src=0)
        self.epoch = where[0]
        self.sched.load_state_dict(where[1])
        for group, lr in zip(self.opt.param_groups, self.sched.get_last_lr()):
            group["lr"] = lr

    def save(self):
        if self.rank == 0:
            CKPT.parent.mkdir(parents=True, exist_ok=True)
            torch.save(
                {
                    "net": self.net.state_dict(),
                    "opt": self.opt.state_dict(),
                    "sched": self.sched.state_dict(),
                    "epoch": self.epoch,
                },
                CKPT,
            )
        dist.barrier()

    def train_epoch(self):
        self.ddp.train()
        self.sampler.set_epoch(self.epoch)
        total = torch.zeros(1)
        for x, y in self.loader:
            loss = nn.functional.cross_entropy(self.ddp(x), y, label_smoothing=0.05)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            total += loss.detach()
        self.sched.step()
        self.epoch += 1
        dist.all_reduce(total)
        return total.item() / (self.world * len(self.loader))

    @torch.no_grad()
    def accuracy(self):
        self.net.eval()
        x, y = self.test_set.tensors
        x, y = x[self.rank::self.world], y[self.rank::self.world]
        good = torch.tensor([(self.net(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(good)
        return (good[0] / good[1]).item()

    def run(self):
        until = min(self.epoch + EPOCHS_PER_SLOT, TOTAL_EPOCHS)
        while self.epoch < until:
            loss = self.train_epoch()
            acc = self.accuracy()
            log.info("epoch %d loss %.4f test acc %.4f", self.epoch, loss, acc)
        self.save()
        return self.epoch >= TOTAL_EPOCHS


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    if rank == 0:
        CKPT.unlink(missing_ok=True)
    dist.barrier()
    finished = False
    while not finished:
        finished = Slot(rank, world).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
