"""VQ autoencoder for short speech frames (synthetic formants), codebook kept by moving averages."""
import math
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FRAME, LATENT, CODES = 64, 12, 48
BATCH, EPOCHS, BETA = 32, 4, 0.25
OUT = pathlib.Path("out/s06")


def frames(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(FRAME) / FRAME
    vowel = torch.randint(10, (n,), generator=g)
    f1 = 2 + 0.7 * vowel + 0.3 * torch.randn(n, generator=g)
    f2 = 8 + 1.5 * ((vowel * 7) % 10) + 0.5 * torch.randn(n, generator=g)
    wave = torch.sin(2 * math.pi * f1[:, None] * t) + 0.5 * torch.sin(2 * math.pi * f2[:, None] * t)
    return wave + 0.05 * torch.randn(n, FRAME, generator=g)


class Codebook(nn.Module):
    def __init__(self, decay=0.95, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        init = torch.randn(CODES, LATENT)
        self.register_buffer("codes", init)
        self.register_buffer("mass", torch.ones(CODES))
        self.register_buffer("sums", init.clone())

    @torch.no_grad()
    def update(self, z, idx):
        onehot = F.one_hot(idx, CODES).to(z.dtype)
        mass = onehot.sum(0)
        sums = onehot.T @ z
        self.mass.mul_(self.decay).add_(mass, alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        n = self.mass.sum()
        size = (self.mass + self.eps) / (n + CODES * self.eps) * n
        self.codes.copy_(self.sums / size[:, None])

    def forward(self, z):
        idx = torch.cdist(z, self.codes).argmin(1)
        q = self.codes[idx]
        if self.training:
            self.update(z.detach(), idx)
        commit = F.mse_loss(z, q)
        return z + (q - z).detach(), commit, idx


class VQAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(FRAME, 96), nn.GELU(), nn.Linear(96, LATENT),
                                 nn.LayerNorm(LATENT, elementwise_affine=False))
        self.vq = Codebook()
        self.dec = nn.Sequential(nn.Linear(LATENT, 96), nn.GELU(), nn.Linear(96, FRAME))

    def forward(self, x):
        q, commit, idx = self.vq(self.enc(x))
        return self.dec(q), commit, idx


@torch.no_grad()
def evaluate(net, x):
    """Reconstruction error and number of codes in use over the whole validation set."""
    net.eval()
    rec, _, idx = net(x[dist.get_rank()::dist.get_world_size()])
    mine = x[dist.get_rank()::dist.get_world_size()]
    err = torch.stack([(rec - mine).pow(2).sum(), torch.tensor(float(mine.numel()))])
    used = torch.bincount(idx, minlength=CODES)
    dist.all_reduce(err)
    dist.all_reduce(used)
    return (err[0] / err[1]).item(), int((used > 0).sum())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train, val = frames(2048, 1), frames(400, 2)
    ds = TensorDataset(train)
    sampler = DistributedSampler(ds, shuffle=True, seed=8)
    loader = DataLoader(ds, BATCH, sampler=sampler, drop_last=True)

    model = DDP(VQAE())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for (x,) in loader:
            rec, commit, _ = model(x)
            loss = F.mse_loss(rec, x) + BETA * commit
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
        mse, used = evaluate(model.module, val)
        if rank == 0:
            print(f"epoch {epoch}: val mse {mse:.4f}, {used}/{CODES} codes in use")

    if rank == 0:
        OUT.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), OUT / "vqae.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
