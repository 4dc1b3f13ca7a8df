# CLIP-like two-tower model on synthetic (image, caption) pairs, in-batch negatives from all workers.
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Cfg:
    n_train: int = 1600
    n_val: int = 200
    batch: int = 32
    epochs: int = 3
    dim: int = 32
    lr: float = 2e-3
    out: str = "out/h02"


cfg = Cfg()
VOCAB, LEN = 50, 8


class GatherWithGrad(torch.autograd.Function):
    """all_gather whose backward returns to each worker what all workers' losses say about its rows."""

    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[0]
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.n
        return grad[start:start + ctx.n]


def make_pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    proj = torch.randn(6, 3 * 12 * 12, generator=torch.Generator().manual_seed(99))
    latent = torch.randn(n, 6, generator=g)
    img = (latent @ proj).view(n, 3, 12, 12) + 0.5 * torch.randn(n, 3, 12, 12, generator=g)
    bins = ((latent + 2.5) / 5 * 8).long().clamp(0, 7)
    words = bins + torch.arange(6) * 8
    filler = torch.randint(48, VOCAB, (n, LEN - 6), generator=g)
    return img, torch.cat([words, filler], 1)


class TwoTower(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.GELU(),
            nn.Flatten(), nn.Linear(32 * 9, d))
        self.tok = nn.Embedding(VOCAB, d)
        self.text = nn.Sequential(nn.LayerNorm(LEN * d), nn.Linear(LEN * d, 64), nn.GELU(), nn.Linear(64, d))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.1)))

    def forward(self, img, txt):
        zi = F.normalize(self.image(img), dim=-1)
        zt = F.normalize(self.text(self.tok(txt).flatten(1)), dim=-1)
        return zi, zt, self.logit_scale.exp()


def clip_loss(zi, zt, scale):
    # own rows against everybody's columns; the mean over workers that DDP takes makes it the global mean
    all_i, all_t = GatherWithGrad.apply(zi), GatherWithGrad.apply(zt)
    target = torch.arange(len(zi)) + dist.get_rank() * len(zi)
    return 0.5 * (F.cross_entropy(scale * zi @ all_t.T, target) + F.cross_entropy(scale * zt @ all_i.T, target))


@torch.no_grad()
def recall_at_1(net, img, txt):
    r, w = dist.get_rank(), dist.get_world_size()
    zi, zt, _ = net(img[r::w], txt[r::w])
    zi, zt = GatherWithGrad.apply(zi), GatherWithGrad.apply(zt)
    best = (zi @ zt.T).argmax(1)
    return (best == torch.arange(len(best))).float().mean().item()


def main():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = TwoTower(cfg.dim)
    ddp = DistributedDataParallel(net)

    train = TensorDataset(*make_pairs(cfg.n_train, 1))
    val = make_pairs(cfg.n_val, 2)
    sampler = DistributedSampler(train, seed=5)
    loader = DataLoader(train, cfg.batch, sampler=sampler, drop_last=True)

    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=cfg.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg.lr, total_steps=cfg.epochs * len(loader))

    os.makedirs(cfg.out, exist_ok=True)
    best = -1.0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for img, txt in loader:
            loss = clip_loss(*ddp(img, txt))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            with torch.no_grad():
                net.logit_scale.clamp_(0, math.log(100))
        ddp.eval()
        score = recall_at_1(net, *val)
        shown = loss.detach().clone()
        dist.all_reduce(shown, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"epoch {epoch}: loss {shown.item() / dist.get_world_size():.3f} R@1 {score:.3f}", flush=True)
        if score > best:
            best = score
            if rank == 0:
                torch.save(net.state_dict(), os.path.join(cfg.out, "best.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
