"""Keyword spotting on synthetic log-mel patches (plain DDP)."""
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Cfg:
    seed: int = 1234
    clips: int = 1000
    words: int = 10
    mels: int = 16
    frames: int = 24
    val_fraction: float = 0.2
    batch: int = 16
    epochs: int = 4
    lr: float = 3e-3
    out: str = "out/p13"


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class KeywordClips(Dataset):
    def __init__(self, cfg):
        rng = np.random.default_rng(0)
        templates = rng.normal(size=(cfg.words, cfg.mels, cfg.frames))
        self.y = rng.integers(0, cfg.words, cfg.clips)
        flip = rng.random(cfg.clips) < 0.15
        noise = rng.normal(scale=2.2, size=(cfg.clips, cfg.mels, cfg.frames))
        self.x = (templates[self.y] + noise).astype(np.float32)
        self.y[flip] = rng.integers(0, cfg.words, flip.sum())

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), int(self.y[i])


def spec_augment(x):
    """One time mask and one frequency mask per clip, plus a random gain."""
    b, m, t = x.shape
    f0 = torch.randint(0, m - 2, (b, 1, 1))
    t0 = torch.randint(0, t - 3, (b, 1, 1))
    fi, ti = torch.arange(m).view(1, m, 1), torch.arange(t).view(1, 1, t)
    keep = ~(((fi >= f0) & (fi < f0 + 2)) | ((ti >= t0) & (ti < t0 + 3)))
    return x * keep * (0.9 + 0.2 * torch.rand(b, 1, 1))


class Spotter(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(cfg.mels, 48, 5, padding=2), nn.GroupNorm(6, 48), nn.ReLU(), nn.AvgPool1d(2),
            nn.Conv1d(48, 48, 3, padding=1), nn.GroupNorm(6, 48), nn.ReLU(),
        )
        self.fc = nn.Linear(48 * (cfg.frames // 2), cfg.words)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2, dtype=torch.long)
    for x, y in loader:
        counts[0] += (model(x).argmax(1) == y).sum()
        counts[1] += len(y)
    dist.all_reduce(counts)
    model.train()
    return counts[0].item() / counts[1].item()


def main():
    cfg = Cfg()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(cfg.seed + rank)  # own augmentation stream per process

    data = KeywordClips(cfg)
    n_val = int(cfg.val_fraction * len(data))
    train_set, val_set = random_split(data, [len(data) - n_val, n_val])
    train_sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    val_sampler = DistributedSampler(val_set, num_replicas=world, rank=rank, shuffle=False)
    train_dl = DataLoader(train_set, cfg.batch, sampler=train_sampler, drop_last=True)
    val_dl = DataLoader(val_set, 50, sampler=val_sampler)

    model = DistributedDataParallel(Spotter(cfg))
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, cfg.epochs * len(train_dl))

    history = []
    for epoch in range(cfg.epochs):
        train_sampler.set_epoch(epoch)
        loss_sum = torch.zeros(1)
        for x, y in train_dl:
            opt.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(spec_augment(x)), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            sched.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        acc = evaluate(model.module, val_dl)
        history.append({"epoch": epoch, "loss": loss_sum.item() / (world * len(train_dl)), "val_acc": acc})
        if rank == 0:
            print(history[-1], flush=True)

    if rank == 0:
        out = Path(cfg.out)
        out.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), out / "spotter.pt")
        (out / "run.json").write_text(json.dumps({"cfg": asdict(cfg), "history": history}, indent=2))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
