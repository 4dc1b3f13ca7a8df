# GAN on a ring of 8 gaussians
import os, math, argparse
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

ap = argparse.ArgumentParser()
ap.add_argument('--epochs', default=3, type=int)
ap.add_argument('--bs', default=64, type=int)
ap.add_argument('--zdim', default=8, type=int)
opt = ap.parse_args()

dist.init_process_group('nccl' if torch.cuda.is_available() else 'gloo')
R, W, LR = dist.get_rank(), dist.get_world_size(), int(os.environ['LOCAL_RANK'])
if torch.cuda.is_available():
    torch.cuda.set_device(LR)
    dev = torch.device('cuda', LR)
    ids = [LR]
else:
    dev, ids = torch.device('cpu'), None

g = torch.Generator().manual_seed(5)
k = torch.randint(0, 8, (4096,), generator=g)
pts = torch.stack([torch.cos(k * math.pi / 4), torch.sin(k * math.pi / 4)], 1) * 2
pts = pts + 0.05 * torch.randn(4096, 2, generator=g)
ds = TensorDataset(pts)
smp = DistributedSampler(ds, shuffle=True)
dl = DataLoader(ds, batch_size=opt.bs, sampler=smp, drop_last=True)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.LeakyReLU(.2), nn.Linear(64, 64), nn.LeakyReLU(.2), nn.Linear(64, o))


torch.manual_seed(99)
G = DDP(mlp(opt.zdim, 2).to(dev), device_ids=ids)
D = DDP(mlp(2, 1).to(dev), device_ids=ids)
og = torch.optim.Adam(G.parameters(), 1e-3, betas=(.5, .999))
od = torch.optim.Adam(D.parameters(), 1e-3, betas=(.5, .999))
torch.manual_seed(99 + 1 + R)      # own noise stream per process

for ep in range(opt.epochs):
    smp.set_epoch(ep)
    tot = torch.zeros(3, device=dev)
    for (real,) in dl:
        real = real.to(dev)
        n = real.size(0)
        # discriminator
        with torch.no_grad():
            fake = G.module(torch.randn(n, opt.zdim, device=dev))
        logits = D(torch.cat([real, fake]))
        target = torch.cat([torch.ones(n, 1, device=dev), torch.zeros(n, 1, device=dev)])
        ld = F.binary_cross_entropy_with_logits(logits, target)
        od.zero_grad()
        ld.backward()
        od.step()
        # generator: D is only a fixed function here, its weights take no update
        D.requires_grad_(False)
        out = D.module(G(torch.randn(n, opt.zdim, device=dev)))
        lg = F.binary_cross_entropy_with_logits(out, torch.ones_like(out))
        og.zero_grad()
        lg.backward()
        og.step()
        D.requires_grad_(True)
        tot += torch.stack([ld.detach(), lg.detach(), torch.ones((), device=dev)])
    # fraction of generated points near some mode, over all processes
    with torch.no_grad():
        z = torch.randn(500, opt.zdim, device=dev)
        s = G.module(z)
        ang = torch.arange(8, device=dev) * math.pi / 4
        centers = torch.stack([ang.cos(), ang.sin()], 1) * 2
        good = (torch.cdist(s, centers).min(1).values < .3).float().sum()
        ev = torch.stack([good, torch.tensor(500., device=dev)])
    dist.all_reduce(ev)
    dist.all_reduce(tot)
    if R == 0:
        print(f'ep {ep} D {tot[0]/tot[2]:.3f} G {tot[1]/tot[2]:.3f} near-mode {ev[0]/ev[1]:.3f}')

dist.barrier()
dist.destroy_process_group()
