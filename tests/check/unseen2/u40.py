"""Two-tower contrastive training with negatives from all processes."""
import argparse
import logging
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class GatherLayer(torch.autograd.Function):
    """Concatenation over ranks; backward sums what every rank contributed to the local slice."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        lo = dist.get_rank() * ctx.rows
        return grad[lo:lo + ctx.rows]


class Captions(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        latent = torch.randn(n, 8, generator=g)
        a = torch.randn(8, 20, generator=torch.Generator().manual_seed(1))
        b = torch.randn(8, 14, generator=torch.Generator().manual_seed(2))
        self.img = latent @ a + 0.3 * torch.randn(n, 20, generator=g)
        self.txt = torch.tanh(latent @ b) + 0.1 * torch.randn(n, 14, generator=g)

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return self.img[i], self.txt[i]


def tower(d):
    return nn.Sequential(nn.Linear(d, 48), nn.ReLU(), nn.Linear(48, 16))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = tower(20), tower(14)
        self.log_temp = nn.Parameter(torch.tensor(2.0))

    def forward(self, img, txt):
        return F.normalize(self.image(img), dim=1), F.normalize(self.text(txt), dim=1), self.log_temp.exp()


def clip_loss(a, b, temp):
    """Local rows against the global pool; the mean over ranks is the full-batch loss."""
    all_a, all_b = GatherLayer.apply(a), GatherLayer.apply(b)
    target = torch.arange(len(a)) + dist.get_rank() * len(a)
    return 0.5 * (F.cross_entropy(temp * a @ all_b.T, target) + F.cross_entropy(temp * b @ all_a.T, target))


@torch.no_grad()
def recall_at_1(net, data):
    net.eval()
    a, b, _ = net(data.img, data.txt)
    net.train()
    return ((a @ b.T).argmax(1) == torch.arange(len(a))).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=32, help="per process")
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save", default=os.path.join(tempfile.gettempdir(), "two_tower.pt"))
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(61)

    train, val = Captions(640, 3), Captions(100, 4)
    sampler = DistributedSampler(train, world, rank, shuffle=True, drop_last=True)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)
    model = DDP(TwoTower())
    no_wd = [p for p in model.parameters() if p.ndim < 2]
    wd = [p for p in model.parameters() if p.ndim >= 2]
    opt = torch.optim.AdamW([{"params": wd, "weight_decay": 0.05}, {"params": no_wd, "weight_decay": 0.0}], lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for img, txt in loader:
            loss = clip_loss(*model(img, txt))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            with torch.no_grad():
                model.module.log_temp.clamp_(0, 4.6)
            total += loss.detach()
        dist.all_reduce(total)
        # the validation pool is small: every rank scores all of it, the numbers are the same
        r1 = recall_at_1(model.module, val)
        log_msg = (epoch, total.item() / (len(loader) * world), r1, model.module.log_temp.exp().item())
        logging.info("epoch %d loss %.4f recall@1 %.3f temp %.2f", *log_msg)

    if rank == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
