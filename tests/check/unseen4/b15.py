"""
Two-stage transfer on digits: linear probing first, then the whole network with a smaller learning rate.
`pretrain_backbone` stands in for downloading weights.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Backbone(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, dim), nn.LayerNorm(dim))

    def forward(self, x):
        return self.layers(x)


class Classifier(nn.Module):
    def __init__(self, backbone, dim=96, classes=10):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(F.gelu(self.backbone(x)))

    def set_backbone_trainable(self, flag):
        for p in self.backbone.parameters():
            p.requires_grad_(flag)


def pretrain_backbone(x, steps=40):
    """Short reconstruction task, every process arrives at the same weights."""
    g = torch.Generator().manual_seed(0)
    body, dec = Backbone(), nn.Linear(96, 64)
    opt = torch.optim.Adam([*body.parameters(), *dec.parameters()], lr=1e-3)
    for _ in range(steps):
        b = x[torch.randint(len(x), (64,), generator=g)]
        loss = F.mse_loss(dec(body(b)), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return body


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    c = torch.zeros(2)
    for x, y in loader:
        c += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float32)
    dist.all_reduce(c)
    model.train()
    return (c[0] / c[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--probe_epochs", type=int, default=1)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--backbone_lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=6)
    ap.add_argument("--out", default="out/transfer.pt")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    data, target = load_digits(return_X_y=True)
    x, y = torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(target)
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(4))
    x, y = x[perm], y[perm]
    train, test = TensorDataset(x[:1397], y[:1397]), TensorDataset(x[1397:], y[1397:])
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, 100, sampler=DistributedSampler(test, shuffle=False))

    net = Classifier(pretrain_backbone(x[:1397]))
    net.set_backbone_trainable(False)
    model = DDP(net)
    opt = torch.optim.AdamW(net.head.parameters(), lr=args.lr, weight_decay=0.01)

    for epoch in range(args.epochs):
        if epoch == args.probe_epochs:
            net.set_backbone_trainable(True)
            opt.add_param_group({"params": list(net.backbone.parameters()), "lr": args.backbone_lr})
            if rank == 0:
                n = sum(p.numel() for p in net.parameters() if p.requires_grad)
                print(f"backbone released, {n} trainable parameters", flush=True)
        sampler.set_epoch(epoch)
        total, n = torch.zeros(()), 0
        for bx, by in loader:
            loss = F.cross_entropy(model(bx), by)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 5.0)
            opt.step()
            total += loss.detach()
            n += 1
        total /= n
        dist.all_reduce(total)
        acc = accuracy(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / dist.get_world_size():.4f} test acc {acc:.4f}", flush=True)
            os.makedirs(os.path.dirname(args.out), exist_ok=True)
            torch.save(net.state_dict(), args.out)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
