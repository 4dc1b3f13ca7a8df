import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# Speaker embeddings with an additive angular margin, on artificial "filterbank" clips.

cfg = dict(speakers=40, clips=24, frames=30, bands=20, emb=32, bs=16, epochs=4, lr=3e-3,
           margin=0.2, scale=16.0, out="out/q02")


class Clips(Dataset):
    def __init__(self, part):
        g = torch.Generator().manual_seed(77)
        base = torch.randn(cfg["speakers"], cfg["bands"], generator=g)
        speed = torch.rand(cfg["speakers"], generator=g) * 0.5 + 0.1
        g = torch.Generator().manual_seed({"train": 1, "enroll": 2, "test": 3}[part])
        per = cfg["clips"] if part == "train" else 6
        self.items = []
        t = torch.arange(cfg["frames"]).float()
        for s in range(cfg["speakers"]):
            for _ in range(per):
                phase = torch.rand(1, generator=g) * 6.28
                envelope = 1 + 0.5 * torch.sin(speed[s] * t + phase)
                noise = torch.randn(cfg["bands"], cfg["frames"], generator=g)
                self.items.append((base[s][:, None] * envelope[None] + 4.0 * noise, s))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class TDNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(cfg["bands"], 48, 5, padding=2), nn.ReLU(), nn.GroupNorm(6, 48),
            nn.Conv1d(48, 48, 3, dilation=2, padding=2), nn.ReLU(), nn.GroupNorm(6, 48),
        )
        self.out = nn.Linear(96, cfg["emb"])

    def forward(self, x):
        h = self.net(x)
        pooled = torch.cat([h.mean(-1), h.std(-1)], dim=1)
        return self.out(pooled)


class AngularMargin(nn.Module):
    def __init__(self, emb, classes, scale, margin):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, emb))
        nn.init.xavier_uniform_(self.weight)
        self.scale, self.margin = scale, margin

    def forward(self, e, label):
        cos = F.linear(F.normalize(e), F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        target = torch.cos(torch.acos(cos) + self.margin)
        easy = cos > math.cos(math.pi - self.margin)
        target = torch.where(easy, target, cos)
        hot = F.one_hot(label, cos.size(1)).bool()
        return F.cross_entropy(self.scale * torch.where(hot, target, cos), label)


@torch.no_grad()
def identification(net, rank, world):
    """Nearest enrolled speaker; the test clips are dealt out to the processes."""
    net.eval()
    enroll, test = Clips("enroll"), Clips("test")
    e = F.normalize(net(torch.stack([x for x, _ in enroll.items])))
    owner = torch.tensor([s for _, s in enroll.items])
    centroid = torch.zeros(cfg["speakers"], cfg["emb"]).index_add_(0, owner, e)
    mine = test.items[rank::world]
    q = F.normalize(net(torch.stack([x for x, _ in mine])))
    guess = (q @ F.normalize(centroid).t()).argmax(1)
    truth = torch.tensor([s for _, s in mine])
    stat = torch.tensor([(guess == truth).sum().item(), len(mine)], dtype=torch.float64)
    dist.all_reduce(stat)
    net.train()
    return (stat[0] / stat[1]).item()


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(3)

    data = Clips("train")
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=cfg["bs"], sampler=sampler, drop_last=True)

    net = DistributedDataParallel(TDNN())
    criterion = AngularMargin(cfg["emb"], cfg["speakers"], cfg["scale"], cfg["margin"])
    optim = torch.optim.AdamW(
        [{"params": net.parameters()}, {"params": criterion.parameters(), "weight_decay": 1e-3}],
        lr=cfg["lr"], weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(optim, cfg["lr"], epochs=cfg["epochs"], steps_per_epoch=len(loader))

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        tally = torch.zeros(2, dtype=torch.float64)
        for x, s in loader:
            optim.zero_grad()
            loss = criterion(net(x), s)
            loss.backward()
            optim.step()
            sched.step()
            tally += torch.tensor([loss.item() * len(s), len(s)], dtype=torch.float64)
        dist.all_reduce(tally)
        acc = identification(net.module, rank, world)
        if rank == 0:
            print(f"[{epoch}] loss {tally[0] / tally[1]:.3f}  identification {acc:.3f}", flush=True)

    if rank == 0:
        os.makedirs(cfg["out"], exist_ok=True)
        torch.save({"net": net.module.state_dict(), "head": criterion.state_dict()},
                   os.path.join(cfg["out"], "speaker.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
