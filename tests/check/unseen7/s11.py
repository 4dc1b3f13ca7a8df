"""Segmentation of synthetic blobs with unlabelled borders; stops after two epochs and resumes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SIZE, CLASSES, VOID = 24, 3, 255
BATCH, EPOCHS, STOP_AFTER, LR = 12, 4, 2, 4e-3
OUT = "out/s11"
CKPT = os.path.join(OUT, "state.pt")


def scenes(n, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    masks = torch.zeros(n, SIZE, SIZE, dtype=torch.long)
    for k in range(n):
        for c in (1, 2):
            cy, cx = torch.randint(4, SIZE - 4, (2,), generator=g).tolist()
            r = int(torch.randint(3, 6, (1,), generator=g))
            d = ((yy - cy) ** 2 + (xx - cx) ** 2).sqrt() if c == 1 else torch.maximum((yy - cy).abs(), (xx - cx).abs())
            masks[k][d <= r] = c
            if torch.rand(1, generator=g) < 0.5:  # half of the objects have an unsure border
                masks[k][(d > r - 1) & (d <= r + 1)] = VOID
    base = torch.tensor([0.0, 0.8, 1.0])[masks.clamp(max=2)]
    images = base[:, None] + 0.4 * torch.randn(n, 1, SIZE, SIZE, generator=g)
    return TensorDataset(images, masks)


class MiniUNet(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        conv = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU())
        self.a, self.b, self.c = conv(1, w), conv(w, 2 * w), conv(3 * w, w)
        self.out = nn.Conv2d(w, CLASSES, 1)

    def forward(self, x):
        a = self.a(x)
        b = F.interpolate(self.b(F.max_pool2d(a, 2)), scale_factor=2)
        return self.out(self.c(torch.cat([a, b], 1)))


def start():
    """Model, optimizer, schedule and first epoch; from the checkpoint where there is one."""
    model = DDP(MiniUNet())
    opt = torch.optim.AdamW(model.parameters(), lr=LR)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS)
    first = 0
    if os.path.exists(CKPT):
        state = torch.load(CKPT, map_location="cpu")
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        first = state["epoch"] + 1
    return model, opt, sched, first


@torch.no_grad()
def miou(net, ds):
    net.eval()
    x, y = (t[dist.get_rank()::dist.get_world_size()] for t in ds.tensors)
    pred = torch.cat([net(part).argmax(1) for part in x.split(32)])
    keep = y != VOID
    conf = torch.bincount(y[keep] * CLASSES + pred[keep], minlength=CLASSES**2)
    dist.all_reduce(conf)
    conf = conf.view(CLASSES, CLASSES).double()
    inter = conf.diag()
    return (inter / (conf.sum(0) + conf.sum(1) - inter)).mean().item()


def run(train, val, weight, last_epoch):
    rank, world = dist.get_rank(), dist.get_world_size()
    model, opt, sched, first = start()
    sampler = DistributedSampler(train, shuffle=True, seed=2)
    loader = DataLoader(train, BATCH, sampler=sampler)
    for epoch in range(first, last_epoch):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            total = F.cross_entropy(model(x), y, weight, ignore_index=VOID, reduction="sum")
            mass = weight[y[y != VOID]].sum()
            dist.all_reduce(mass)
            loss = total * world / mass
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        score = miou(model.module, val)
        if rank == 0:
            print(f"epoch {epoch} lr {sched.get_last_lr()[0]:.5f} mIoU {score:.4f}")
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(),
                        "sched": sched.state_dict(), "epoch": epoch}, CKPT)
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    if dist.get_rank() == 0:
        os.makedirs(OUT, exist_ok=True)
        if os.path.exists(CKPT):
            os.remove(CKPT)
    dist.barrier()
    train, val = scenes(480, 1), scenes(101, 2)
    labels = train.tensors[1]
    counts = torch.bincount(labels[labels != VOID], minlength=CLASSES).float()
    weight = (counts.sum() / counts).sqrt()
    run(train, val, weight, STOP_AFTER)
    run(train, val, weight, EPOCHS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
