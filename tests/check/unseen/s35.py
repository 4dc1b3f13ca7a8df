"""CLIP-like alignment of two modalities, negatives gathered across processes."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    n: int = 2048
    dim_a: int = 20
    dim_b: int = 30
    latent: int = 10
    embed: int = 16
    batch_size: int = 32
    epochs: int = 3
    lr: float = 3e-3
    seed: int = 5


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        ctx.batch = tensor.shape[0]
        parts = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=0)

    @staticmethod
    def backward(ctx, grad_output):
        grad = grad_output.contiguous()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.batch
        return grad[start:start + ctx.batch]


class TwoTower(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(cfg.dim_a, 64), nn.ReLU(), nn.Linear(64, cfg.embed))
        self.b = nn.Sequential(nn.Linear(cfg.dim_b, 64), nn.ReLU(), nn.Linear(64, cfg.embed))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, xa, xb):
        return F.normalize(self.a(xa), dim=1), F.normalize(self.b(xb), dim=1), self.logit_scale.exp()


class ClipLoss(nn.Module):
    def forward(self, za, zb, scale):
        all_a, all_b = AllGather.apply(za), AllGather.apply(zb)
        logits_a = scale * za @ all_b.t()
        logits_b = scale * zb @ all_a.t()
        labels = torch.arange(za.size(0), device=za.device)
        return 0.5 * (F.cross_entropy(logits_a, labels) + F.cross_entropy(logits_b, labels))


def pairs(cfg, n, seed):
    w = torch.Generator().manual_seed(0)
    A = torch.randn(cfg.latent, cfg.dim_a, generator=w)
    B = torch.randn(cfg.latent, cfg.dim_b, generator=w)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, cfg.latent, generator=g)
    return (torch.tanh(z @ A) + 0.1 * torch.randn(n, cfg.dim_a, generator=g),
            torch.tanh(z @ B) + 0.1 * torch.randn(n, cfg.dim_b, generator=g))


@torch.no_grad()
def retrieval_top1(model, a, b):
    model.eval()
    za, zb, _ = model(a, b)
    return ((za @ zb.t()).argmax(1) == torch.arange(len(a), device=a.device)).float().mean().item()


def main():
    cfg = Config()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(local)

    train = TensorDataset(*pairs(cfg, cfg.n, cfg.seed))
    va, vb = (t.to(device) for t in pairs(cfg, 200, cfg.seed + 1))
    sampler = DistributedSampler(train, shuffle=True, seed=cfg.seed)
    loader = DataLoader(train, batch_size=cfg.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(cfg.seed)
    net = TwoTower(cfg).to(device)
    model = DDP(net, device_ids=[local] if use_cuda else None)
    loss_fn = ClipLoss()
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for xa, xb in loader:
            loss = loss_fn(*model(xa.to(device), xb.to(device)))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} retrieval top-1 of 200: {retrieval_top1(net, va, vb):.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
