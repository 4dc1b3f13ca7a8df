"""Two-stage fine-tuning: train the classifier first, then the whole network."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class DigitImages(Dataset):
    def __init__(self, split, augment=False, seed=0):
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
        keep = order[:300] if split == "val" else order[300:]
        self.images = torch.tensor(digits.images, dtype=torch.float32)[keep].unsqueeze(1) / 16.0
        self.labels = torch.tensor(digits.target)[keep]
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        x = self.images[i]
        if self.augment:
            dx, dy = torch.randint(-1, 2, (2,)).tolist()
            x = torch.roll(x, (dx, dy), dims=(1, 2))
        return x, self.labels[i]


class Classifier(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(512, hidden), nn.LayerNorm(hidden), nn.ReLU(),
        )
        self.head = nn.Linear(hidden, 10)

    def forward(self, x):
        return self.head(self.backbone(x))

    def set_backbone_trainable(self, flag):
        for p in self.backbone.parameters():
            p.requires_grad_(flag)


def reduce_sums(*values):
    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t)
    return t.tolist()


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    loss = correct = n = 0.0
    for x, y in loader:
        out = net(x)
        loss += F.cross_entropy(out, y, reduction="sum").item()
        correct += (out.argmax(1) == y).sum().item()
        n += len(y)
    net.train()
    loss, correct, n = reduce_sums(loss, correct, n)
    return loss / n, correct / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--warmup-epochs", type=int, default=1)
    ap.add_argument("--batch-size", type=int, default=24)
    ap.add_argument("--head-lr", type=float, default=3e-3)
    ap.add_argument("--backbone-lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--out", default="./out/e04")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    train_set = DigitImages("train", augment=True)
    val_set = DigitImages("val")
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, 50, sampler=DistributedSampler(val_set, shuffle=False))

    net = Classifier()
    net.set_backbone_trainable(args.warmup_epochs == 0)
    model = DDP(net)
    optimizer = torch.optim.AdamW([
        {"params": net.head.parameters(), "lr": args.head_lr},
        {"params": net.backbone.parameters(), "lr": args.backbone_lr},
    ])
    torch.manual_seed(args.seed + 31 * (rank + 1))

    for epoch in range(args.epochs):
        if epoch == args.warmup_epochs:
            net.set_backbone_trainable(True)
        sampler.set_epoch(epoch)
        loss_sum = steps = 0
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
            steps += 1
        loss_sum, steps = reduce_sums(loss_sum, steps)
        val_loss, val_acc = evaluate(net, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: train {loss_sum / steps:.4f} val {val_loss:.4f} acc {val_acc:.4f}")

    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(net.state_dict(), os.path.join(args.out, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
