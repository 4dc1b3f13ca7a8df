"""Two-tower dense retrieval with in-batch negatives shared between workers."""
import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("retrieval")


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        ctx.rows = x.size(0)
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


class BiEncoder(nn.Module):
    def __init__(self, dq, dd, dim=32):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(dq, 96), nn.GELU(), nn.Linear(96, dim))
        self.doc = nn.Sequential(nn.Linear(dd, 96), nn.GELU(), nn.Linear(96, dim))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, q, d):
        q = F.normalize(self.query(q), dim=-1)
        d = F.normalize(self.doc(d), dim=-1)
        return q, d, self.log_scale.clamp(max=4.6).exp()


class InBatchLoss(nn.Module):
    def forward(self, q, d, scale):
        pool = GatherLayer.apply(d)
        scores = scale * q @ pool.t()
        target = torch.arange(scores.size(0), device=scores.device)
        return F.cross_entropy(scores, target)


def make_pairs(n, seed):
    world = torch.Generator().manual_seed(99)
    a, b = torch.randn(12, 40, generator=world), torch.randn(12, 56, generator=world)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 12, generator=g)
    q = torch.tanh(z @ a * 0.4) + 0.1 * torch.randn(n, 40, generator=g)
    d = torch.tanh(z @ b * 0.4) + 0.1 * torch.randn(n, 56, generator=g)
    return q, d


@torch.no_grad()
def recall_at(model, q, d, ks=(1, 10)):
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    qe, de, _ = model(q, d)
    mine = torch.arange(rank, len(q), world)
    order = (qe[mine] @ de.t()).argsort(dim=1, descending=True)
    hits = torch.tensor([(order[:, :k] == mine[:, None]).any(1).sum().item() for k in ks] + [len(mine)])
    dist.all_reduce(hits)
    return {f"R@{k}": hits[i].item() / hits[-1].item() for i, k in enumerate(ks)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--out", default="./out/d04")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")

    torch.manual_seed(0)
    train = TensorDataset(*make_pairs(2560, seed=1))
    val_q, val_d = make_pairs(400, seed=2)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)

    model = DDP(BiEncoder(40, 56))
    criterion = InBatchLoss()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * len(loader))

    best = -1.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros(())
        for q, d in loader:
            loss = criterion(*model(q, d))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            running += loss.detach()
        dist.all_reduce(running)
        metrics = recall_at(model.module, val_q, val_d)
        log.info("epoch %d loss %.4f %s", epoch, running.item() / len(loader) / dist.get_world_size(), metrics)
        if metrics["R@10"] > best:
            best = metrics["R@10"]
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(model.module.state_dict(), os.path.join(args.out, "biencoder.pt"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
