"""Two-tower contrastive pretraining (CLIP-like) on paired synthetic views."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class GatherLayer(torch.autograd.Function):
    """all_gather along dim 0 that lets gradients through."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        ctx.n = x.shape[0]
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        r = dist.get_rank()
        return grad[r * ctx.n:(r + 1) * ctx.n]


class PairedViews(Dataset):
    """A latent 'concept' seen through two fixed nonlinear sensors."""

    def __init__(self, n, seed, noise=0.3):
        sensors = torch.Generator().manual_seed(777)
        self.wa = torch.randn(12, 48, generator=sensors) / 12 ** 0.5
        self.wb = torch.randn(12, 32, generator=sensors) / 12 ** 0.5
        g = torch.Generator().manual_seed(seed)
        self.z = torch.randn(n, 12, generator=g)
        self.noise = noise

    def __len__(self):
        return len(self.z)

    def __getitem__(self, i):
        a, b = torch.tanh(self.z[i] @ self.wa), torch.sin(self.z[i] @ self.wb)
        return a + self.noise * torch.randn_like(a), b + self.noise * torch.randn_like(b)


def tower(d_in, d_out=32):
    return nn.Sequential(nn.Linear(d_in, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, d_out))


class DualEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = tower(48), tower(32)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a, b):
        return F.normalize(self.a(a), dim=-1), F.normalize(self.b(b), dim=-1), self.logit_scale.exp()


def clip_loss(za, zb, scale):
    all_a, all_b = GatherLayer.apply(za), GatherLayer.apply(zb)
    target = torch.arange(len(za)) + dist.get_rank() * len(za)
    return 0.5 * (F.cross_entropy(scale * za @ all_b.T, target) + F.cross_entropy(scale * zb @ all_a.T, target))


@torch.no_grad()
def recall_at_1(model, loader):
    model.eval()
    zs = [model.module(a, b)[:2] for a, b in loader]
    za, zb = (torch.cat(t) for t in zip(*zs))
    za, zb = GatherLayer.apply(za), GatherLayer.apply(zb)
    model.train()
    hit = (za @ zb.T).argmax(1) == torch.arange(len(za))
    return hit.float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=64, help="per process")
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--out", default="out")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)

    train, val = PairedViews(3000, seed=10), PairedViews(256, seed=11)
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, batch_size=64, sampler=DistributedSampler(val, shuffle=False))

    model = DistributedDataParallel(DualEncoder())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    total = args.epochs * len(loader)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1, (s + 1) / 10) * 0.5 * (1 + math.cos(math.pi * min(s / total, 1.0))))

    best = -1.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (a, b) in enumerate(loader):
            loss = clip_loss(*model(a, b))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, math.log(100))
            if step % 10 == 0:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                if rank == 0:
                    print(f"epoch {epoch} step {step:3d} loss {shown.item() / dist.get_world_size():.4f}", flush=True)
        r1 = recall_at_1(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch} recall@1 {r1:.4f}", flush=True)
            if r1 > best:
                os.makedirs(args.out, exist_ok=True)
                torch.save(model.module.state_dict(), os.path.join(args.out, "dual_encoder.pt"))
        best = max(best, r1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
