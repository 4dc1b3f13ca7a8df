"""Blob segmentation with a tiny U-Net; the second half of the run starts from the checkpoint of the first."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, SIZE = 4, 12, 24
CKPT = "out/q09/last.pt"


def scenes(n, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    mask = torch.zeros(n, SIZE, SIZE)
    for _ in range(3):
        c = torch.rand(n, 2, 1, 1, generator=g) * SIZE
        r = 2 + 4 * torch.rand(n, 1, 1, generator=g)
        mask = torch.maximum(mask, (((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) < r**2).float())
    image = mask + 0.8 * torch.randn(n, SIZE, SIZE, generator=g)
    return TensorDataset(image[:, None], mask[:, None])


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2 = conv(1, 8), conv(8, 16)
        self.mid = conv(16, 16)
        self.u1 = conv(24, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.mid(self.d2(F.max_pool2d(a, 2)))
        return self.out(self.u1(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)))


def average_buffers(net, world):
    """Running statistics are local during an epoch (broadcast_buffers=False); join them before use."""
    for buf in net.buffers():
        if buf.is_floating_point():
            dist.all_reduce(buf)
            buf.div_(world)


def build(steps):
    torch.manual_seed(0)
    net = DDP(UNet(), broadcast_buffers=False)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
    return net, opt, sched


def save(net, opt, sched, epoch, best, rng):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, rng.get_state())
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(CKPT), exist_ok=True)
        torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                    "epoch": epoch, "best": best, "rng": states}, CKPT + ".tmp")
        os.replace(CKPT + ".tmp", CKPT)
    dist.barrier()


@torch.no_grad()
def iou(net, data, rank, world):
    net.eval()
    img, ref = data.tensors
    pred = net(img[rank::world]) > 0
    ref = ref[rank::world] > 0.5
    both = torch.tensor([(pred & ref).sum(), (pred | ref).sum()], dtype=torch.float64)
    dist.all_reduce(both)
    net.train()
    return (both[0] / both[1]).item()


def run(until, train, val, resume):
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, BATCH, sampler=sampler, drop_last=True)
    net, opt, sched = build(EPOCHS * len(loader))
    rng = torch.Generator().manual_seed(50 + rank)
    first, best = 0, 0.0
    if resume:
        state = torch.load(CKPT, map_location="cpu")
        net.module.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        rng.set_state(state["rng"][rank])
        first, best = state["epoch"] + 1, state["best"]

    for epoch in range(first, until):
        sampler.set_epoch(epoch)
        for img, mask in loader:
            flip = [d for d in (2, 3) if torch.rand((), generator=rng) < 0.5]
            img, mask = img.flip(flip), mask.flip(flip)
            img = img + 0.1 * torch.randn(img.shape, generator=rng)
            logit = net(img)
            prob = logit.sigmoid()
            dice = 1 - (2 * (prob * mask).sum((1, 2, 3)) + 1) / ((prob + mask).sum((1, 2, 3)) + 1)
            loss = F.binary_cross_entropy_with_logits(logit, mask) + dice.mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        average_buffers(net.module, world)
        score = iou(net.module, val, rank, world)
        if score > best:
            best = score
            if rank == 0:
                os.makedirs("out/q09", exist_ok=True)
                torch.save(net.module.state_dict(), "out/q09/best.pt")
        save(net, opt, sched, epoch, best, rng)
        if rank == 0:
            print(f"epoch {epoch}: IoU {score:.4f} (best {best:.4f}) lr {sched.get_last_lr()[0]:.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_set, val_set = scenes(384, 1), scenes(101, 2)
    run(EPOCHS // 2, train_set, val_set, resume=False)
    run(EPOCHS, train_set, val_set, resume=True)
    dist.barrier()
    dist.destroy_process_group()
