#!/usr/bin/env python
# Image-ish classifier with EMA weights and resume. 8x8 synthetic glyphs.
import argparse
import copy
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Glyphs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        base = (torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(5)) > 0.5).float()
        self.y = torch.randint(0, 6, (n,), generator=g)
        self.x = base[self.y] + 0.8 * torch.randn(n, 1, 8, 8, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3, padding=1)
        self.n1 = nn.GroupNorm(2, 8)
        self.c2 = nn.Conv2d(8, 16, 3, padding=1)
        self.n2 = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16 * 4, 6)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.n1(self.c1(x))), 2)
        x = F.max_pool2d(F.relu(self.n2(self.c2(x))), 2)
        return self.fc(x.flatten(1))


class EMA:
    def __init__(self, model, decay):
        self.net = copy.deepcopy(model).eval()
        for p in self.net.parameters():
            p.requires_grad_(False)
        self.decay, self.n = decay, 0

    @torch.no_grad()
    def update(self, model):
        self.n += 1
        d = min(self.decay, (1 + self.n) / (10 + self.n))
        for e, p in zip(self.net.parameters(), model.parameters()):
            e.mul_(d).add_(p, alpha=1 - d)
        for e, b in zip(self.net.buffers(), model.buffers()):
            e.copy_(b)


def flip(x):
    mask = torch.rand(len(x), 1, 1, 1) < 0.1
    return torch.where(mask, x.roll(1, dims=-1), x)


def save(path, **objs):
    tmp = path + ".part"
    torch.save(objs, tmp)
    os.replace(tmp, path)


def test(net, ds, rank, world):
    loader = DataLoader(torch.utils.data.Subset(ds, list(range(rank, len(ds), world))), 64)
    ok = torch.zeros(2, dtype=torch.long)
    with torch.no_grad():
        for x, y in loader:
            ok[0] += (net(x).argmax(1) == y).sum()
            ok[1] += len(y)
    dist.all_reduce(ok)
    return 100.0 * ok[0].item() / ok[1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--ema", type=float, default=0.95)
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--ckpt", default=os.path.join(tempfile.gettempdir(), "glyphs_ema.pt"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)      # augmentation differs per rank; DDP broadcasts rank 0's init

    model = DDP(ConvNet())
    ema = EMA(model.module, args.ema)
    opt = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [2], 0.1)
    start = 0
    if args.resume and os.path.exists(args.ckpt):
        c = torch.load(args.ckpt, map_location="cpu")
        model.module.load_state_dict(c["model"])
        ema.net.load_state_dict(c["ema"])
        ema.n = c["ema_n"]
        opt.load_state_dict(c["opt"])
        sched.load_state_dict(c["sched"])
        start = c["epoch"] + 1

    train, val = Glyphs(768, 1), Glyphs(199, 2)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(flip(x)), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update(model.module)
        sched.step()
        raw, avg = test(model.module.eval(), val, rank, world), test(ema.net, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: raw {raw:.1f}% ema {avg:.1f}%", flush=True)
            save(args.ckpt, model=model.module.state_dict(), ema=ema.net.state_dict(), ema_n=ema.n,
                 opt=opt.state_dict(), sched=sched.state_dict(), epoch=epoch)
        dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
