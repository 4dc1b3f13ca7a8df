"""Non-saturating GAN on a ring of Gaussians, two DDP models, averaged generator for sampling."""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

MODES = 8


class Ring:
    def __init__(self, batch, seed):
        self.batch = batch
        self.g = torch.Generator().manual_seed(seed)
        angle = torch.arange(MODES) * 2 * math.pi / MODES
        self.centers = torch.stack([angle.cos(), angle.sin()], 1) * 2

    def next(self):
        k = torch.randint(MODES, (self.batch,), generator=self.g)
        return self.centers[k] + 0.1 * torch.randn(self.batch, 2, generator=self.g)


def mlp(i, o, h=96, act=nn.ReLU):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, h), act(), nn.Linear(h, o))


@torch.no_grad()
def update_average(avg, net, decay):
    for a, p in zip(avg.parameters(), net.parameters()):
        a.lerp_(p, 1 - decay)


@torch.no_grad()
def covered_modes(gen, centers, latent, n=2000):
    z = torch.randn(n, latent, generator=torch.Generator().manual_seed(123))
    d = torch.cdist(gen(z), centers)
    near, which = d.min(1)
    good = near < 0.4
    counts = torch.bincount(which[good], minlength=MODES)
    return int((counts > n / MODES / 10).sum()), good.float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--latent", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--ema", type=float, default=0.98)
    ap.add_argument("--seed", type=int, default=77)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    netG, netD = mlp(args.latent, 2), mlp(2, 1, act=lambda: nn.LeakyReLU(0.2))
    avgG = copy.deepcopy(netG).requires_grad_(False)
    G, D = DDP(netG), DDP(netD)
    opt_g = torch.optim.Adam(G.parameters(), lr=args.lr, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), lr=args.lr, betas=(0.5, 0.99))
    torch.manual_seed(args.seed + 1 + rank)
    data = Ring(args.batch, seed=args.seed + 500 + rank)

    for epoch in range(args.epochs):
        stat = torch.zeros(2)
        for _ in range(args.steps):
            real = data.next()

            with torch.no_grad():
                fake = netG(torch.randn(args.batch, args.latent))
            out_real, out_fake = D(torch.cat([real, fake])).chunk(2)
            loss_d = F.softplus(-out_real).mean() + F.softplus(out_fake).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()

            # gradients that arrive in netD here are thrown away by the next opt_d.zero_grad()
            loss_g = F.softplus(-netD(G(torch.randn(args.batch, args.latent)))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            update_average(avgG, netG, args.ema)
            stat += torch.tensor([loss_d.item(), loss_g.item()]) / args.steps

        dist.all_reduce(stat)
        if rank == 0:
            modes, quality = covered_modes(avgG, data.centers, args.latent)
            d, g = (stat / world).tolist()
            print(f"epoch {epoch} D {d:.3f} G {g:.3f} modes {modes}/{MODES} in-mode {quality:.3f}", flush=True)
            os.makedirs("out", exist_ok=True)
            torch.save({"G": netG.state_dict(), "G_avg": avgG.state_dict(), "D": netD.state_dict()}, "out/ring.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
