"""BPR matrix factorisation on implicit feedback, leave-one-out HR@10."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

N_USERS, N_ITEMS, DIM = 401, 300, 16
EPOCHS, BATCH, SEED = 3, 128, 7
OUT = "./out/c01"


def make_interactions():
    g = torch.Generator().manual_seed(1234)
    u = torch.randn(N_USERS, 4, generator=g)
    v = torch.randn(N_ITEMS, 4, generator=g)
    prob = torch.softmax(1.5 * u @ v.T, dim=1)
    items = torch.multinomial(prob, 21, generator=g)
    users = torch.arange(N_USERS).unsqueeze(1).expand_as(items)
    train = torch.stack([users[:, 1:], items[:, 1:]], dim=-1).reshape(-1, 2)
    seen = torch.zeros(N_USERS, N_ITEMS, dtype=torch.bool)
    seen[train[:, 0], train[:, 1]] = True
    return train, items[:, 0], seen


class BPR(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(N_USERS, DIM)
        self.item = nn.Embedding(N_ITEMS, DIM)
        self.bias = nn.Embedding(N_ITEMS, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, u, pos, neg):
        eu = self.user(u)
        sp = (eu * self.item(pos)).sum(-1) + self.bias(pos).squeeze(-1)
        sn = (eu * self.item(neg)).sum(-1) + self.bias(neg).squeeze(-1)
        return sp, sn

    def score_all(self, u):
        return self.user(u) @ self.item.weight.T + self.bias.weight.T


@torch.no_grad()
def hit_rate(model, held_out, seen, rank, world):
    model.eval()
    users = torch.arange(N_USERS)[rank::world]
    scores = model.score_all(users).masked_fill(seen[users], float("-inf"))
    top = scores.topk(10, dim=1).indices
    hits = (top == held_out[users].unsqueeze(1)).any(1).sum()
    stat = torch.tensor([hits.item(), len(users)], dtype=torch.float64)
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)
    train, held_out, seen = make_interactions()

    ds = TensorDataset(train[:, 0], train[:, 1])
    sampler = DistributedSampler(ds, world, rank, shuffle=True, seed=SEED)
    loader = DataLoader(ds, batch_size=BATCH, sampler=sampler)

    model = DDP(BPR())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-6)
    if rank == 0:
        os.makedirs(OUT, exist_ok=True)

    best = -1.0
    path = os.path.join(OUT, "best.pt")
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        neg_gen = torch.Generator().manual_seed(SEED + 1000 * epoch + rank)
        total, n = 0.0, 0
        for u, pos in loader:
            neg = torch.randint(N_ITEMS, pos.shape, generator=neg_gen)
            clash = seen[u, neg]
            while clash.any():
                neg[clash] = torch.randint(N_ITEMS, (int(clash.sum()),), generator=neg_gen)
                clash = seen[u, neg]
            sp, sn = model(u, pos, neg)
            loss = -F.logsigmoid(sp - sn).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(u)
            n += len(u)
        agg = torch.tensor([total, n], dtype=torch.float64)
        dist.reduce(agg, dst=0)
        hr = hit_rate(model.module, held_out, seen, rank, world)
        if rank == 0:
            print(f"epoch {epoch} bpr {(agg[0] / agg[1]).item():.4f} HR@10 {hr:.4f}")
        if hr > best:
            best = hr
            if rank == 0:
                torch.save(model.module.state_dict(), path)

    dist.barrier()
    model.module.load_state_dict(torch.load(path, map_location="cpu"))
    final = hit_rate(model.module, held_out, seen, rank, world)
    if rank == 0:
        print(f"best HR@10 {final:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
