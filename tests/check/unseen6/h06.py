#!/usr/bin/env python
"""Spoken-command classifier (synthetic filterbank features, GRU).

Our queue gives us short slots, so training is cut in slots of SLOT_EPOCHS epochs; every slot picks
up from the checkpoint that the one before it left.  Here the slots run one after another.
"""
import math
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROOT = pathlib.Path("out/h06")
CKPT = ROOT / "last.pt"
SLOTS, SLOT_EPOCHS = 2, 2
BATCH, PEAK_LR, SEED = 32, 3e-3, 77
FRAMES, MELS, WORDS = 30, 20, 8


def synth(n, seed):
    """Each word is a pair of formant tracks; speakers differ in pitch, speed and loudness."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, WORDS, (n,), generator=g)
    t = torch.linspace(0, 1, FRAMES)
    speed = 1 + 0.3 * torch.randn(n, 1, generator=g)
    shift = 0.6 * torch.randn(n, 1, generator=g)
    f1 = 4 + 0.5 * y[:, None] + 2 * torch.sin(speed * t * (1 + y[:, None] % 3) * math.pi) + shift
    f2 = 14 - 0.6 * y[:, None] + 2 * torch.cos(speed * t * (1 + y[:, None] % 4) * math.pi) + shift
    mel = torch.arange(MELS).float()
    x = torch.exp(-((mel - f1[..., None]) ** 2) / 3) + torch.exp(-((mel - f2[..., None]) ** 2) / 3)
    x = x * (1 + 0.3 * torch.randn(n, 1, 1, generator=g)) + 0.25 * torch.randn(n, FRAMES, MELS, generator=g)
    return TensorDataset(x, y)


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(MELS)
        self.rnn = nn.GRU(MELS, 48, batch_first=True, bidirectional=True)
        self.out = nn.Linear(96, WORDS)

    def forward(self, x):
        h, _ = self.rnn(self.norm(x))
        return self.out(h.mean(1))


def set_lr(opt, step, total):
    warm = 20
    scale = step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
    for group in opt.param_groups:
        group["lr"] = PEAK_LR * scale


@torch.no_grad()
def error_rate(net, data, rank, world):
    net.eval()
    x, y = data[rank::world]
    s = torch.tensor([(net(x).argmax(1) != y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(s)
    net.train()
    return (s[0] / s[1]).item()


def run_slot(slot, train, dev, rank, world):
    torch.manual_seed(SEED)
    net = Spotter()
    opt = torch.optim.AdamW(net.parameters(), lr=PEAK_LR, betas=(0.9, 0.999), weight_decay=0.01)
    progress = {"epoch": 0, "step": 0}
    if rank == 0 and CKPT.exists():
        ck = torch.load(CKPT, weights_only=True)
        net.load_state_dict(ck["net"])
        opt.load_state_dict(ck["opt"])
        progress = ck["progress"]
        print(f"slot {slot}: resuming at epoch {progress['epoch']}", flush=True)
    box = [progress]
    dist.broadcast_object_list(box, src=0)
    progress = box[0]
    ddp = DDP(net)

    sampler = DistributedSampler(train, shuffle=True, seed=SEED, drop_last=True)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, drop_last=True)
    total = SLOTS * SLOT_EPOCHS * len(loader)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.05)

    for epoch in range(progress["epoch"], progress["epoch"] + SLOT_EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            progress["step"] += 1
            set_lr(opt, progress["step"], total)
            opt.zero_grad(set_to_none=True)
            loss_fn(ddp(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()
        err = error_rate(net, dev, rank, world)
        if rank == 0:
            print(f"slot {slot} epoch {epoch} step {progress['step']} dev error {err:.3f}", flush=True)
        progress["epoch"] = epoch + 1
        if rank == 0:
            tmp = CKPT.with_suffix(".tmp")
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "progress": dict(progress)}, tmp)
            os.replace(tmp, CKPT)
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        ROOT.mkdir(parents=True, exist_ok=True)
        CKPT.unlink(missing_ok=True)
    dist.barrier()
    train, dev = synth(1280, 1), synth(320, 2)
    for slot in range(SLOTS):
        run_slot(slot, train, dev, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
