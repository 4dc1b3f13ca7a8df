import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_blobs(n, seed, size=24):
    """Images holding one bright disc and one dark square; classes: bg / disc / square."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    imgs = 0.6 * torch.randn(n, 1, size, size, generator=g)
    masks = torch.zeros(n, size, size, dtype=torch.long)
    for k in range(n):
        cy, cx, qy, qx = torch.randint(5, size - 5, (4,), generator=g).tolist()
        r = int(torch.randint(3, 6, (1,), generator=g))
        disc = (yy - cy) ** 2 + (xx - cx) ** 2 <= r * r
        square = ((yy - qy).abs() <= 3) & ((xx - qx).abs() <= 3)
        masks[k][disc] = 1
        masks[k][square] = 2
        imgs[k, 0] += (masks[k] == 1) * 1.0 - (masks[k] == 2) * 1.0
    return TensorDataset(imgs, masks)


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())


class TinyUNet(nn.Module):
    def __init__(self, c=12, classes=3):
        super().__init__()
        self.e1, self.e2 = block(1, c), block(c, 2 * c)
        self.mid = block(2 * c, 2 * c)
        self.d2, self.d1 = block(4 * c, c), block(2 * c, c)
        self.head = nn.Conv2d(c, classes, 1)

    def forward(self, x):
        a = self.e1(x)
        b = self.e2(F.max_pool2d(a, 2))
        m = F.interpolate(self.mid(F.max_pool2d(b, 2)), scale_factor=2)
        u = F.interpolate(self.d2(torch.cat([m, b], 1)), scale_factor=2)
        return self.head(self.d1(torch.cat([u, a], 1)))


@torch.no_grad()
def miou(model, ds, rank, world):
    model.eval()
    conf = torch.zeros(3, 3, dtype=torch.long)
    for i in range(rank * 10, len(ds), world * 10):
        x, y = ds[i:i + 10]
        pred = model(x).argmax(1)
        conf += torch.bincount((3 * y + pred).flatten(), minlength=9).view(3, 3)
    dist.all_reduce(conf)
    model.train()
    inter = conf.diag().double()
    return (inter / (conf.sum(0) + conf.sum(1) - conf.diag()).clamp(min=1)).mean().item()


def train_one_epoch(model, loader, opt, sched, accum):
    n = len(loader)
    running = 0.0
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        update = (i + 1) % accum == 0
        window = min(accum, n - (i // accum) * accum)
        with nullcontext() if update else model.no_sync():
            loss = F.cross_entropy(model(x), y)
            (loss / window).backward()
        running += loss.item()
        if update or i + 1 == n:
            opt.step()
            sched.step()
            opt.zero_grad()
    stat = torch.tensor([running, n], dtype=torch.float64)
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--out", type=Path, default=Path("out/p02"))
    args = ap.parse_args()

    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    train_ds, val_ds = make_blobs(400, 10), make_blobs(80, 11)
    sampler = DistributedSampler(train_ds, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(train_ds, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(TinyUNet())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    steps = args.epochs * -(-len(loader) // args.accum)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)

    best = -1.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, opt, sched, args.accum)
        score = miou(model.module, val_ds, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}  mIoU {score:.4f}", flush=True)
            if score > best:
                args.out.mkdir(parents=True, exist_ok=True)
                torch.save({"model": model.module.state_dict(), "miou": score}, args.out / "best.pt")
        best = max(best, score)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
