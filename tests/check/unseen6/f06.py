"""Blob segmentation with unlabelled borders. The loss is a mean over all labelled pixels of an update."""
import contextlib
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IGNORE = 255
CLASSES = 3


class Blobs(Dataset):
    def __init__(self, n, seed, size=24):
        self.n, self.seed, self.size = n, seed, size
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        self.grid = torch.stack([yy, xx]).float()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + i)
        img = 0.3 * torch.randn(1, self.size, self.size, generator=g)
        mask = torch.zeros(self.size, self.size, dtype=torch.long)
        for label in range(1, CLASSES):
            centre = 4 + torch.rand(2, generator=g) * (self.size - 8)
            radius = 3 + 4 * torch.rand((), generator=g)
            d = (self.grid - centre[:, None, None]).norm(dim=0)
            mask[d < radius] = label
            img[0] += torch.where(d < radius, 1.0 if label == 1 else -1.0, 0.0)
        border = int(torch.randint(0, 6, (), generator=g))
        if border:
            mask[:border] = IGNORE
        return img, mask


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())


class TinyUNet(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.a, self.b = conv(1, w), conv(w, 2 * w)
        self.c = conv(3 * w, w)
        self.head = nn.Conv2d(w, CLASSES, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        return self.head(self.c(torch.cat([a, F.interpolate(b, scale_factor=2.0)], 1)))


def windows(loader, size):
    it = iter(loader)
    while chunk := list(itertools.islice(it, size)):
        yield chunk


@torch.no_grad()
def mean_iou(net, data, rank, world):
    conf = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
    for i in range(rank, len(data), world):
        img, mask = data[i]
        guess = net(img[None]).argmax(1)[0]
        ok = mask != IGNORE
        conf += torch.bincount(mask[ok] * CLASSES + guess[ok], minlength=CLASSES**2).view(CLASSES, CLASSES)
    dist.all_reduce(conf)
    inter = conf.diag().double()
    return (inter / (conf.sum(0) + conf.sum(1) - conf.diag())).mean().item()


def main(epochs=3, micro=8, accum=3):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    train, valid = Blobs(640, seed=1), Blobs(75, seed=2)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, micro, sampler=sampler)
    net = DDP(TinyUNet())
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        net.train()
        total = torch.zeros((), dtype=torch.float64)
        updates = 0
        for chunk in windows(loader, accum):
            labelled = torch.tensor(sum((m != IGNORE).sum().item() for _, m in chunk), dtype=torch.float64)
            dist.all_reduce(labelled)
            for j, (img, mask) in enumerate(chunk):
                last = j == len(chunk) - 1
                with contextlib.nullcontext() if last else net.no_sync():
                    logits = net(img)
                    summed = F.cross_entropy(logits, mask, ignore_index=IGNORE, reduction="sum")
                    # DDP averages over processes, the sum is what is wanted
                    loss = summed * (world / labelled.item())
                    loss.backward()
                total += summed.detach().double() / labelled
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()
            opt.zero_grad()
            updates += 1
        dist.all_reduce(total)
        net.eval()
        iou = mean_iou(net.module, valid, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: {updates} updates, loss {total.item() / updates:.4f}, mIoU {iou:.4f}")

    if rank == 0:
        os.makedirs("out/f06", exist_ok=True)
        torch.save(net.module.state_dict(), "out/f06/unet.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
