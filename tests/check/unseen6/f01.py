"""Two-tower contrastive matching of the upper and lower half of a digit (CLIP-style, global negatives)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4
BATCH = 48


class Tower(nn.Module):
    def __init__(self, n_in, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class Matcher(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.top = Tower(32, dim)
        self.bottom = Tower(32, dim)
        self.log_scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, a, b):
        return self.top(a), self.bottom(b), self.log_scale.clamp(max=4.6).exp()


def clip_loss(za, zb, scale):
    """Rows are this process' samples, columns are everybody's; the gather carries gradients."""
    every_a = torch.cat(all_gather(za))
    every_b = torch.cat(all_gather(zb))
    offset = dist.get_rank() * za.size(0)
    target = torch.arange(za.size(0)) + offset
    loss_a = F.cross_entropy(scale * za @ every_b.t(), target)
    loss_b = F.cross_entropy(scale * zb @ every_a.t(), target)
    return 0.5 * (loss_a + loss_b)


@torch.no_grad()
def recall_at(model, a, b, k=5):
    """Every process embeds the whole gallery, but answers only its share of the queries."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    za, zb, _ = model(a, b)
    mine = torch.arange(rank, len(a), world)
    top = (za[mine] @ zb.t()).topk(k, dim=1).indices
    hits = (top == mine[:, None]).any(1).sum()
    counts = torch.tensor([hits.item(), len(mine)], dtype=torch.float64)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)

    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(11))
    train, test = x[order[:1500]], x[order[1500:]]
    data = TensorDataset(train[:, :32], train[:, 32:])
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=3, drop_last=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)

    torch.manual_seed(5)
    model = DistributedDataParallel(Matcher())
    torch.manual_seed(1000 + rank)  # augmentation noise
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for a, b in loader:
            a = a + 0.05 * torch.randn_like(a)
            b = b + 0.05 * torch.randn_like(b)
            za, zb, scale = model(a, b)
            loss = clip_loss(za, zb, scale)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            running += loss.detach()
        running /= len(loader)
        dist.all_reduce(running)
        r5 = recall_at(model.module, test[:, :32], test[:, 32:])
        if rank == 0:
            print(f"epoch {epoch}: loss {running.item() / world:.4f}  recall@5 {r5:.3f}")

    if rank == 0:
        os.makedirs("out/f01", exist_ok=True)
        torch.save(model.module.state_dict(), "out/f01/matcher.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
