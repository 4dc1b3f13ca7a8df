"""SimCLR-style pretraining on digits; negatives are shared between processes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS, BATCH, SEED, PATIENCE = 3, 32, 8, 2
OUT = "./out/e07"


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        stacked = torch.stack(grads)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


class TwoViews(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def view(self, x):
        dx, dy = torch.randint(-1, 2, (2,)).tolist()
        x = torch.roll(x, (dx, dy), dims=(1, 2))
        return x * (0.7 + 0.6 * torch.rand(())) + 0.05 * torch.randn_like(x)

    def __getitem__(self, i):
        return self.view(self.images[i]), self.view(self.images[i])


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(512, 64), nn.ReLU(),
        )
        self.proj = nn.Linear(64, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return F.normalize(self.proj(self.features(x)), dim=1), self.logit_scale.exp()


def info_nce(za, zb, scale):
    rank, n = dist.get_rank(), len(za)
    all_a, all_b = torch.cat(GatherLayer.apply(za)), torch.cat(GatherLayer.apply(zb))
    target = torch.arange(n) + rank * n
    return 0.5 * (F.cross_entropy(scale * za @ all_b.T, target) + F.cross_entropy(scale * zb @ all_a.T, target))


@torch.no_grad()
def knn_accuracy(net, bank_x, bank_y, x, y, k=5):
    net.eval()
    bank = F.normalize(net.features(bank_x), dim=1)
    query = F.normalize(net.features(x), dim=1)
    votes = bank_y[(query @ bank.T).topk(k, dim=1).indices]
    net.train()
    return (votes.mode(1).values == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    perm = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    train_idx, val_idx = perm[300:], perm[:300]

    torch.manual_seed(SEED + rank)
    train_set = TwoViews(images[train_idx])
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True)
    model = DDP(Encoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    best, bad = -1.0, 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for a, b in loader:
            z, scale = model(torch.cat([a, b]))
            za, zb = z.chunk(2)
            loss = info_nce(za, zb, scale)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)

        stop = torch.zeros(1)
        if rank == 0:
            acc = knn_accuracy(model.module, images[train_idx], labels[train_idx], images[val_idx], labels[val_idx])
            print(f"epoch {epoch}: nce {total[0] / total[1]:.4f} knn {acc:.4f}")
            if acc > best:
                best, bad = acc, 0
                os.makedirs(OUT, exist_ok=True)
                torch.save(model.module.state_dict(), f"{OUT}/encoder.pt")
            else:
                bad += 1
            stop.fill_(float(bad >= PATIENCE))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
