"""SimCLR-style pretraining on the 8x8 digits, negatives taken from the batches of every process."""
import os
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

OUT = pathlib.Path("out/q01")
EPOCHS, BATCH, TEMP = 3, 32, 0.2


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Conv2d(32, 48, 3, stride=2, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.proj = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, dim))

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return F.normalize(self.proj(self.body(x)), dim=1)


def augment(x, gen):
    dy, dx = torch.randint(-1, 2, (2,), generator=gen).tolist()
    x = torch.roll(x, (dy, dx), dims=(2, 3))
    keep = (torch.rand(x.shape, generator=gen) > 0.15).float()
    gain = 0.7 + 0.6 * torch.rand(x.size(0), 1, 1, 1, generator=gen)
    return x * keep * gain + 0.05 * torch.randn(x.shape, generator=gen)


def nt_xent(z1, z2, temp):
    """Full-batch loss: every process evaluates it on all the embeddings.

    The backward of the gather sums the contributions of all the processes into
    the local slice, which the averaging in DDP takes back.
    """
    z1 = torch.cat(dist_fn.all_gather(z1))
    z2 = torch.cat(dist_fn.all_gather(z2))
    n = z1.size(0)
    z = torch.cat([z1, z2])
    sim = z @ z.t() / temp
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(0, n)])
    return F.cross_entropy(sim, target)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0
    y = torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    tr, te = order[:1500], order[1500:]

    train = TensorDataset(x[tr])
    sampler = DistributedSampler(train, shuffle=True, seed=11, drop_last=True)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, drop_last=True)

    model = DDP(Encoder())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS * len(loader))
    gen = torch.Generator().manual_seed(1000 + rank)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros(())
        for (img,) in loader:
            views = torch.cat([augment(img, gen), augment(img, gen)])
            z1, z2 = model(views).chunk(2)
            loss = nt_xent(z1, z2, TEMP)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            running += loss.detach()
        if rank == 0:
            # the loss is the same number on every process
            print(f"epoch {epoch}: nt-xent {running.item() / len(loader):.4f}", flush=True)

    if rank == 0:
        enc = model.module.eval()
        with torch.no_grad():
            ftr, fte = enc.features(x[tr]).numpy(), enc.features(x[te]).numpy()
        probe = LogisticRegression(max_iter=300).fit(ftr, y[tr].numpy())
        acc = probe.score(fte, y[te].numpy())
        print(f"linear probe accuracy {acc:.4f}")
        os.makedirs(OUT, exist_ok=True)
        torch.save({"encoder": enc.state_dict(), "probe_acc": acc}, OUT / "encoder.pt")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
