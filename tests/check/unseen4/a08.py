"""SimCLR pre-training on digits with a kNN probe (DDP, gloo)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GatherLayer(torch.autograd.Function):
    """all_gather for use inside a loss."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        return grads[dist.get_rank()].contiguous()


class SimCLR(nn.Module):
    def __init__(self, width=24, proj=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
            nn.Flatten(), nn.Linear(2 * width * 16, 96),
        )
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, proj))

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)), dim=-1)


class NTXent(nn.Module):
    """Anchors of this process against the views of all processes."""

    def __init__(self, temperature):
        super().__init__()
        self.t = temperature

    def forward(self, z1, z2):
        n, rank, world = len(z1), dist.get_rank(), dist.get_world_size()
        keys = torch.cat([*GatherLayer.apply(z1), *GatherLayer.apply(z2)])
        anchors = torch.cat([z1, z2])
        logits = anchors @ keys.T / self.t
        me = torch.arange(n) + rank * n
        me = torch.cat([me, me + world * n])
        logits = logits.scatter(1, me[:, None], float("-inf"))
        positives = me.roll(n)
        return F.cross_entropy(logits, positives)


def random_view(x):
    b = len(x)
    angle = (torch.rand(b) - 0.5) * 0.7
    scale = 1 + (torch.rand(b) - 0.5) * 0.4
    shift = (torch.rand(b, 2) - 0.5) * 0.5
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    theta = torch.stack([torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)], 1)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, align_corners=False)
    return x + 0.05 * torch.randn_like(x)


@torch.no_grad()
def knn_probe(encoder, bank, bank_y, query, query_y, k=10):
    encoder.eval()
    bank, query = F.normalize(encoder(bank), dim=1), F.normalize(encoder(query), dim=1)
    near = (query @ bank.T).topk(k, dim=1).indices
    pred = bank_y[near].mode(dim=1).values
    stat = torch.tensor([(pred == query_y).sum().item(), len(query_y)], dtype=torch.float64)
    dist.all_reduce(stat)
    encoder.train()
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=48)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--temperature", type=float, default=0.2)
    ap.add_argument("--seed", type=int, default=21)
    ap.add_argument("--out", default="./out/a08")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    tr, te = perm[:1400], perm[1400:][rank::world]
    dataset = TensorDataset(x[tr])
    sampler = DistributedSampler(dataset, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    model = DDP(SimCLR())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(loader))
    criterion = NTXent(args.temperature)
    torch.manual_seed(args.seed + 1 + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for (xb,) in loader:
            z1, z2 = model(torch.cat([random_view(xb), random_view(xb)])).chunk(2)
            loss = criterion(z1, z2)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            total += loss.detach()
        dist.all_reduce(total)
        acc = knn_probe(model.module.encoder, x[tr], y[tr], x[te], y[te])
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world / len(loader):.4f} knn {acc:.4f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save(model.module.encoder.state_dict(), os.path.join(args.out, "encoder.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
