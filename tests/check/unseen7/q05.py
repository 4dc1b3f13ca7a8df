"""VQ-VAE on 8x8 digits, codebook learned by exponential moving averages."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--codes", type=int, default=64)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--decay", type=float, default=0.9)
    p.add_argument("--beta", type=float, default=0.25)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--out", default="out/q05")
    return p.parse_args()


class Quantizer(nn.Module):
    def __init__(self, codes, dim, decay, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        book = torch.randn(codes, dim) * 0.1
        self.register_buffer("book", book)
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", book.clone())

    def forward(self, z):
        b, c, h, w = z.shape
        flat = z.permute(0, 2, 3, 1).reshape(-1, c)
        idx = torch.cdist(flat.detach(), self.book).argmin(1)
        q = F.embedding(idx, self.book)
        if self.training:
            self.update(flat.detach(), idx)
        commit = F.mse_loss(flat, q)
        q = flat + (q - flat).detach()
        return q.view(b, h, w, c).permute(0, 3, 1, 2), commit, idx

    @torch.no_grad()
    def update(self, flat, idx):
        hot = F.one_hot(idx, self.book.size(0)).to(flat.dtype)
        self.count.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(hot.t() @ flat, alpha=1 - self.decay)
        n = self.count.sum()
        smooth = (self.count + self.eps) / (n + self.count.numel() * self.eps) * n
        self.book.copy_(self.total / smooth[:, None])


class VQVAE(nn.Module):
    def __init__(self, args):
        super().__init__()
        d = args.dim
        self.enc = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(),
                                 nn.Conv2d(32, d, 1))
        self.vq = Quantizer(args.codes, d, args.decay)
        self.dec = nn.Sequential(nn.Conv2d(d, 32, 3, 1, 1), nn.ReLU(),
                                 nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 1, 3, 1, 1))

    def forward(self, x):
        q, commit, idx = self.vq(self.enc(x))
        return self.dec(q), commit, idx


@torch.no_grad()
def validate(net, images, codes):
    rank, world = dist.get_rank(), dist.get_world_size()
    net.eval()
    part = images[rank::world]
    rec, _, idx = net(part)
    sums = torch.stack([F.mse_loss(rec, part, reduction="sum"), torch.tensor(float(part.numel()))]).double()
    usage = torch.bincount(idx, minlength=codes).double()
    dist.all_reduce(sums)
    dist.all_reduce(usage)
    p = usage / usage.sum()
    perplexity = torch.exp(-(p * torch.log(p + 1e-10)).sum())
    net.train()
    return (sums[0] / sums[1]).item(), perplexity.item()


def main():
    args = get_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)

    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    train, val = TensorDataset(images[:1500]), images[1500:]
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)

    net = DDP(VQVAE(args))
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for (x,) in loader:
            rec, commit, _ = net(x)
            loss = F.mse_loss(rec, x) + args.beta * commit
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(meter)
        mse, ppl = validate(net.module, val, args.codes)
        if rank == 0:
            print(f"epoch {epoch} train {meter[0] / meter[1]:.4f} val mse {mse:.4f} code perplexity {ppl:.1f}", flush=True)

    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(net.module.state_dict(), os.path.join(args.out, "vqvae.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
