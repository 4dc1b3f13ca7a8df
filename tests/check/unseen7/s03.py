#!/usr/bin/env python
# Two-tower retrieval with in-batch negatives shared between the workers.
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

N_USERS, N_ITEMS, LATENT = 1200, 600, 6
EMB, BATCH, EPOCHS, LR, TEMP = 32, 48, 4, 5e-3, 0.1
SAVE_DIR = os.path.join("out", "s03")


def simulate_clicks(seed=2024, per_user=5):
    """Users have side features; clicks are drawn from a low-rank preference model."""
    gen = torch.Generator().manual_seed(seed)
    user_lat = torch.randn(N_USERS, LATENT, generator=gen)
    item_lat = torch.randn(N_ITEMS, LATENT, generator=gen)
    mix_u = torch.randn(LATENT, 16, generator=gen)
    mix_i = torch.randn(LATENT, 20, generator=gen)
    user_x = user_lat @ mix_u + 0.1 * torch.randn(N_USERS, 16, generator=gen)
    item_x = item_lat @ mix_i + 0.1 * torch.randn(N_ITEMS, 20, generator=gen)
    prob = torch.softmax(1.5 * user_lat @ F.normalize(item_lat, dim=1).T, dim=1)
    clicks = torch.multinomial(prob, per_user, generator=gen)
    return user_x, item_x, clicks


class Tower(nn.Module):
    def __init__(self, dim_in):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim_in, 64), nn.GELU(), nn.Linear(64, EMB))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(16), Tower(20)
        self.log_temp = nn.Parameter(torch.tensor(TEMP).log())

    def forward(self, u, i):
        return self.user(u), self.item(i), self.log_temp.exp()


def retrieval_loss(u, i, temp):
    """Softmax over the items of every worker's batch."""
    pool = torch.cat(dist_fn.all_gather(i), dim=0)
    logits = u @ pool.T / temp
    target = torch.arange(u.size(0), device=u.device)
    return F.cross_entropy(logits, target)


@torch.no_grad()
def recall_at(model, user_x, item_x, held_out, k=20):
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    items = model.item(item_x)
    mine = slice(rank, None, world)
    top = (model.user(user_x[mine]) @ items.T).topk(k, dim=1).indices
    found = (top == held_out[mine, None]).any(1)
    stat = torch.tensor([found.sum().item(), found.numel()], dtype=torch.float64)
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)

    user_x, item_x, clicks = simulate_clicks()
    held_out = clicks[:, -1]
    history = clicks[:, :-1]
    pairs = torch.stack(
        [torch.arange(N_USERS).repeat_interleave(history.size(1)), history.reshape(-1)], dim=1)

    ds = TensorDataset(pairs)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    dl = DataLoader(ds, batch_size=BATCH, sampler=sampler, drop_last=True)

    net = DistributedDataParallel(TwoTower())
    opt = torch.optim.Adam(net.parameters(), lr=LR)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS * len(dl))

    for epoch in range(EPOCHS):
        t0 = time.time()
        sampler.set_epoch(epoch)
        net.train()
        total = torch.zeros(())
        for (batch,) in dl:
            u, i, temp = net(user_x[batch[:, 0]], item_x[batch[:, 1]])
            loss = retrieval_loss(u, i, temp)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            total += loss.detach()
        dist.all_reduce(total)
        rec = recall_at(net.module, user_x, item_x, held_out)
        if rank == 0:
            print(f"[{epoch}] loss={total.item() / len(dl) / dist.get_world_size():.3f} "
                  f"recall@20={rec:.3f} ({time.time() - t0:.1f}s)")

    if rank == 0:
        os.makedirs(SAVE_DIR, exist_ok=True)
        torch.save(net.module.state_dict(), os.path.join(SAVE_DIR, "two_tower.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
