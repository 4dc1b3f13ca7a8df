"""VQ-VAE on 8x8 digit images; codebook learned by exponential moving averages (van den Oord et al., app. A.1)."""
import logging
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("vqvae")


class VectorQuantizerEMA(nn.Module):
    def __init__(self, num_codes=48, dim=8, decay=0.9, eps=1e-5):
        super().__init__()
        self.num_codes, self.decay, self.eps = num_codes, decay, eps
        embed = torch.randn(num_codes, dim) * 0.1
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(num_codes))
        self.register_buffer("embed_sum", embed.clone())

    @torch.no_grad()
    def _update(self, flat, onehot):
        counts = onehot.sum(0)
        sums = onehot.t() @ flat
        self.cluster_size.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.embed_sum.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        size = (self.cluster_size + self.eps) / (n + self.num_codes * self.eps) * n
        self.embed.copy_(self.embed_sum / size.unsqueeze(1))

    def forward(self, z):
        zc = z.permute(0, 2, 3, 1).contiguous()
        flat = zc.view(-1, zc.shape[-1])
        codes = torch.cdist(flat.detach(), self.embed).argmin(1)
        q = F.embedding(codes, self.embed).view_as(zc)
        if self.training:
            self._update(flat.detach(), F.one_hot(codes, self.num_codes).type_as(flat))
        commit = F.mse_loss(zc, q.detach())
        q = zc + (q - zc).detach()
        return q.permute(0, 3, 1, 2), commit, codes


class VQVAE(nn.Module):
    def __init__(self, ch=32, dim=8):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(), nn.Conv2d(ch, ch, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(ch, dim, 1))
        self.vq = VectorQuantizerEMA(dim=dim)
        self.dec = nn.Sequential(
            nn.Conv2d(dim, ch, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(ch, ch, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(ch, 1, 3, padding=1))

    def forward(self, x):
        q, commit, codes = self.vq(self.enc(x))
        return self.dec(q), commit, codes


@torch.no_grad()
def evaluate(model, loader, num_codes):
    model.eval()
    err = torch.zeros(2)
    usage = torch.zeros(num_codes)
    for (x,) in loader:
        recon, _, codes = model(x)
        err += torch.tensor([F.mse_loss(recon, x, reduction="sum").item(), x.numel()])
        usage += torch.bincount(codes, minlength=num_codes)
    dist.all_reduce(err)
    dist.all_reduce(usage)
    p = usage / usage.sum()
    perplexity = torch.exp(-(p * torch.log(p + 1e-10)).sum())
    return (err[0] / err[1]).item(), perplexity.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO if rank == 0 else logging.WARNING)

    images = torch.tensor(load_digits().images / 16.0, dtype=torch.float32).unsqueeze(1)
    perm = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    full = TensorDataset(images)
    train, held = Subset(full, perm[:1437]), Subset(full, perm[1437:])
    sampler = DistributedSampler(train, shuffle=True, seed=21, drop_last=True)
    train_loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)
    held_loader = DataLoader(held, batch_size=60, sampler=DistributedSampler(held, shuffle=False))

    torch.manual_seed(21)
    model = DDP(VQVAE())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    codes = model.module.vq.num_codes

    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        seen = torch.zeros(2)
        for (x,) in train_loader:
            recon, commit, _ = model(x)
            loss = F.mse_loss(recon, x) + 0.25 * commit
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(seen)
        mse, ppl = evaluate(model, held_loader, codes)
        log.info("epoch %d  train %.4f  held-out mse %.4f  code perplexity %.1f", epoch, seen[0] / seen[1], mse, ppl)

    if rank == 0:
        os.makedirs("out/h09", exist_ok=True)
        torch.save(model.module.state_dict(), "out/h09/vqvae.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
