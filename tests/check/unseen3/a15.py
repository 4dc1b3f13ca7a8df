"""Preemptible DDP training: the job is cut into sessions that continue from a checkpoint."""
import argparse
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def xor_blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(2, (n, 3), generator=g)
    noise = torch.randn(n, 9, generator=g)
    x = torch.cat([2.0 * bits - 1 + 0.5 * noise[:, :3], noise[:, 3:]], dim=1)
    return TensorDataset(x, bits[:, 0] ^ bits[:, 1] ^ bits[:, 2])


def build_model():
    return nn.Sequential(nn.Linear(9, 64), nn.LayerNorm(64), nn.Tanh(),
                         nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 2))


def lr_at(step, base, warmup, total):
    if step < warmup:
        return base * (step + 1) / warmup
    return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


class Session:
    def __init__(self, args, folder, device, local):
        self.args, self.device, self.rank, self.world = args, device, dist.get_rank(), dist.get_world_size()
        self.path = os.path.join(folder, "checkpoint.pt")
        torch.manual_seed(args.seed)
        self.train_set, self.val_set = xor_blobs(1024, seed=1), xor_blobs(301, seed=2)
        self.sampler = DistributedSampler(self.train_set, shuffle=True, seed=args.seed, drop_last=True)
        self.loader = DataLoader(self.train_set, batch_size=args.batch_size, sampler=self.sampler)
        self.net = build_model().to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=args.lr)
        self.epoch = 0
        self.load()
        self.model = DDP(self.net, device_ids=[local] if device.type == "cuda" else None)

    def load(self):
        if self.rank == 0 and os.path.exists(self.path):
            state = torch.load(self.path, map_location=self.device)
            self.net.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch = state["epoch"] + 1
            print(f"resuming from {self.path} at epoch {self.epoch}", flush=True)
        start = torch.tensor([self.epoch], device=self.device)
        dist.broadcast(start, src=0)
        self.epoch = int(start.item())

    def save(self):
        if self.rank == 0:
            torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict(),
                        "epoch": self.epoch}, self.path + ".tmp")
            os.replace(self.path + ".tmp", self.path)
        dist.barrier()

    def train_epoch(self):
        args, total = self.args, self.args.epochs * len(self.loader)
        self.sampler.set_epoch(self.epoch)
        for i, (x, y) in enumerate(self.loader):
            step = self.epoch * len(self.loader) + i
            for group in self.optimizer.param_groups:
                group["lr"] = lr_at(step, args.lr, args.warmup, total)
            loss = F.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self):
        self.net.eval()
        x, y = (t[self.rank::self.world].to(self.device) for t in self.val_set.tensors)
        logits = self.net(x)
        stat = torch.stack([F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum().float(),
                            torch.tensor(float(len(y)), device=self.device)])
        dist.all_reduce(stat)
        self.net.train()
        return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item()

    def run(self, stop):
        while self.epoch < stop:
            self.train_epoch()
            loss, acc = self.evaluate()
            if self.rank == 0:
                print(f"epoch {self.epoch} val_loss {loss:.4f} val_acc {acc:.4f}", flush=True)
            self.save()
            self.epoch += 1


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--epochs-per-session", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--warmup", type=int, default=8)
    p.add_argument("--seed", type=int, default=8)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    folder = args.out or (tempfile.mkdtemp(prefix="sessions_") if dist.get_rank() == 0 else "")
    if folder:
        os.makedirs(folder, exist_ok=True)

    stop = 0
    while stop < args.epochs:
        stop = min(stop + args.epochs_per_session, args.epochs)
        Session(args, folder, device, local).run(stop)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
