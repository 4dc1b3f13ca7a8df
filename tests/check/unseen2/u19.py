"""Self-supervised pretraining (variance/invariance/covariance objective) on small vectors."""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Views(Dataset):
    def __init__(self, n=640, d=24, seed=0):
        g = torch.Generator().manual_seed(seed)
        factors = torch.randn(n, 6, generator=g)
        mix = torch.randn(6, d, generator=torch.Generator().manual_seed(1))
        self.x = factors @ mix
        self.y = (factors[:, 0] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def jitter(x, std=0.3, drop=0.2):
    keep = (torch.rand_like(x) > drop).float()
    return (x + std * torch.randn_like(x)) * keep


class Embedder(nn.Module):
    def __init__(self, d=24, h=48, out=16):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(h, h), nn.ReLU(), nn.Linear(h, out))

    def forward(self, a, b):
        z = self.projector(self.backbone(torch.cat([a, b])))
        return z.chunk(2)


def batch_all_gather(z):
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z.contiguous())
    return torch.cat(parts, dim=0)


class VicLoss(nn.Module):
    def __init__(self, sim=25.0, std=25.0, cov=1.0):
        super().__init__()
        self.sim, self.std, self.cov = sim, std, cov

    @staticmethod
    def _std(z):
        return F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean()

    @staticmethod
    def _cov(z):
        z = z - z.mean(0)
        c = z.T @ z / (len(z) - 1)
        off = c - torch.diag(torch.diag(c))
        return off.pow(2).sum() / z.size(1)

    def forward(self, za, zb):
        inv = F.mse_loss(za, zb)
        ga, gb = batch_all_gather(za), batch_all_gather(zb)
        var = 0.5 * (self._std(ga) + self._std(gb))
        cov = self._cov(ga) + self._cov(gb)
        return self.sim * inv + self.std * var + self.cov * cov, (inv.detach(), var.detach(), cov.detach())


@torch.no_grad()
def knn_probe(net, train, test, k=5):
    net.eval()
    ftr, fte = F.normalize(net.backbone(train.x), dim=1), F.normalize(net.backbone(test.x), dim=1)
    votes = train.y[(fte @ ftr.T).topk(k).indices].float().mean(1)
    net.train()
    return ((votes > 0.5).long() == test.y).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "vic_backbone.pt"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(70 + rank)
    train, test = Views(), Views(200, seed=9)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, args.bs, sampler=sampler, drop_last=True)
    model = DDP(Embedder())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    crit = VicLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        logs = torch.zeros(3)
        for x, _ in loader:
            za, zb = model(jitter(x), jitter(x))
            loss, parts = crit(za, zb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            logs += torch.stack(parts)
        logs /= len(loader)
        dist.all_reduce(logs)
        logs /= world
        if rank == 0:
            acc = knn_probe(model.module, train, test)
            print(f"epoch {epoch} inv {logs[0]:.4f} var {logs[1]:.4f} cov {logs[2]:.4f} knn {acc:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.backbone.state_dict(), args.out)
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
