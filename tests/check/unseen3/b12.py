"""Small CNN on synthetic stripes, LR dropped when validation stalls."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def stripes(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    grid = torch.arange(12).float()
    xx, yy = torch.meshgrid(grid, grid, indexing="ij")
    angle = y.float() * torch.pi / 4
    phase = 6.28 * torch.rand(n, generator=g)
    img = torch.sin(1.2 * (xx * angle.cos().view(-1, 1, 1) + yy * angle.sin().view(-1, 1, 1)) + phase.view(-1, 1, 1))
    img = img + 1.5 * torch.randn(n, 12, 12, generator=g)
    return TensorDataset(img.unsqueeze(1), y)


class ConvNet(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, ch, 3, padding=1), nn.GroupNorm(4, ch), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(ch, 2 * ch, 3, padding=1), nn.GroupNorm(4, 2 * ch), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(2 * ch, 4)

    def forward(self, x):
        return self.fc(self.features(x))


class Trainer:
    def __init__(self, args, rank, world, device):
        self.args, self.rank, self.world, self.device = args, rank, world, device
        train, val = stripes(640, 1), stripes(200, 2)
        self.sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed, drop_last=True)
        self.train_loader = DataLoader(train, batch_size=args.batch_size, sampler=self.sampler, drop_last=True)
        self.val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=100)
        torch.manual_seed(args.seed)
        net = ConvNet().to(device)
        self.model = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.sched = ReduceLROnPlateau(self.opt, mode="min", factor=0.5, patience=args.patience)
        self.best = float("inf")

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        total = torch.zeros((), device=self.device)
        for x, y in self.train_loader:
            x, y = x.to(self.device), y.to(self.device)
            loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / (len(self.train_loader) * self.world)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        stats = torch.zeros(3, dtype=torch.float64, device=self.device)
        for x, y in self.val_loader:
            x, y = x.to(self.device), y.to(self.device)
            logits = self.model.module(x)
            stats[0] += F.cross_entropy(logits, y, reduction="sum")
            stats[1] += (logits.argmax(1) == y).sum()
            stats[2] += y.numel()
        dist.reduce(stats, dst=0)
        loss, correct, count = stats.tolist()
        return loss / count, correct / count

    def save(self, path, epoch):
        torch.save({
            "model": self.model.module.state_dict(),
            "optimizer": self.opt.state_dict(),
            "scheduler": self.sched.state_dict(),
            "epoch": epoch,
            "best": self.best,
        }, path)

    def fit(self, out):
        for epoch in range(self.args.epochs):
            train_loss = self.train_epoch(epoch)
            val_loss, val_acc = self.validate()
            self.sched.step(val_loss)
            if self.rank == 0:
                print(f"[{epoch:02d}] train {train_loss:.4f} val {val_loss:.4f} acc {val_acc:.4f} "
                      f"lr {self.opt.param_groups[0]['lr']:.2e}")
                if val_loss < self.best:
                    self.best = val_loss
                    self.save(os.path.join(out, "best.pt"), epoch)
                self.save(os.path.join(out, "last.pt"), epoch)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=16)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--patience", type=int, default=0)
    ap.add_argument("--seed", type=int, default=8)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    out = None
    if rank == 0:
        out = args.out or tempfile.mkdtemp(prefix="stripes_")
        os.makedirs(out, exist_ok=True)
    Trainer(args, rank, world, device).fit(out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
