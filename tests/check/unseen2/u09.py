"""Toy GAN on a ring of Gaussians, two DDP modules, two optimizers."""
import argparse
import math
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def ring(n, gen, modes=6, radius=2.0, std=0.1):
    k = torch.randint(0, modes, (n,), generator=gen).float()
    ang = 2 * math.pi * k / modes
    return radius * torch.stack([ang.cos(), ang.sin()], 1) + std * torch.randn(n, 2, generator=gen)


def mlp(i, o, h=32):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


def flag(module, value):
    for p in module.parameters():
        p.requires_grad_(value)


class GAN:
    def __init__(self, a):
        self.a = a
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(a.seed)
        self.G, self.D = DDP(mlp(a.z, 2)), DDP(mlp(2, 1))
        self.og = torch.optim.Adam(self.G.parameters(), a.lr, betas=(0.5, 0.99))
        self.od = torch.optim.Adam(self.D.parameters(), a.lr, betas=(0.5, 0.99))
        # real samples come from an unlimited stream: every process draws its own
        self.gen = torch.Generator().manual_seed(a.seed * 1000 + self.rank)
        self.ema = {k: v.clone() for k, v in self.G.module.state_dict().items()}

    def noise(self, n):
        return torch.randn(n, self.a.z, generator=self.gen)

    def d_step(self):
        b = self.a.batch
        real = ring(b, self.gen)
        with torch.no_grad():
            fake = self.G.module(self.noise(b))
        score = self.D(torch.cat([real, fake]))
        target = torch.cat([torch.ones(b, 1), torch.zeros(b, 1)])
        loss = F.binary_cross_entropy_with_logits(score, target)
        self.od.zero_grad()
        loss.backward()
        self.od.step()
        return loss.detach()

    def g_step(self):
        fake = self.G(self.noise(self.a.batch))
        flag(self.D, False)
        loss = F.softplus(-self.D.module(fake)).mean()
        self.og.zero_grad()
        loss.backward()
        self.og.step()
        flag(self.D, True)
        with torch.no_grad():
            for k, v in self.G.module.state_dict().items():
                self.ema[k].lerp_(v, 1 - self.a.decay)
        return loss.detach()

    def coverage(self):
        """Share of the modes hit by generated points, pooled over processes."""
        net = mlp(self.a.z, 2)
        net.load_state_dict(self.ema)
        with torch.no_grad():
            pts = net(self.noise(256))
        parts = [torch.empty_like(pts) for _ in range(self.world)]
        dist.all_gather(parts, pts)
        pts = torch.cat(parts)
        near = (pts.norm(dim=1) - 2).abs() < 0.7
        bins = torch.histc(torch.atan2(pts[near, 1], pts[near, 0]), 6, -math.pi, math.pi)
        return (bins > 0).float().mean().item()

    def run(self):
        for step in range(1, self.a.steps + 1):
            ld, lg = self.d_step(), self.g_step()
            if step % self.a.log_every == 0:
                s = torch.stack([ld, lg])
                dist.all_reduce(s)
                s /= self.world
                cov = self.coverage()
                if self.rank == 0:
                    print(f"{step} D {s[0]:.3f} G {s[1]:.3f} coverage {cov:.2f}", flush=True)
        if self.rank == 0:
            torch.save({"G": self.G.module.state_dict(), "D": self.D.module.state_dict(), "ema": self.ema}, self.a.out)
        dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--z", type=int, default=8)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--decay", type=float, default=0.98)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--log-every", type=int, default=50)
    p.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "ring_gan.pt"))
    a = p.parse_args()
    dist.init_process_group("gloo")
    GAN(a).run()
    dist.barrier()
    time.sleep(0.5)  # let the gloo threads finish
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
