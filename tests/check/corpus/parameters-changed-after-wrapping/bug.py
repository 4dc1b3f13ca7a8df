"""Two-stage fine-tuning: train the new head first, then unfreeze the backbone."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Finetuner(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU())
        self.head = nn.Linear(48, 10)
        self.freeze_backbone(True)

    def freeze_backbone(self, frozen):
        for p in self.backbone.parameters():
            p.requires_grad_(not frozen)

    def forward(self, x):
        return self.head(self.backbone(x))


def run_epoch(model, loader, optimizer, device):
    model.train()
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(net, x, y, device):
    net.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    correct = (net(x[mine].to(device)).argmax(1).cpu() == y[mine]).sum()
    counts = torch.tensor([correct, len(y[mine])], device=device)
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main(args):
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(args.local_rank)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=3))
    device = torch.device("cuda", args.local_rank) if cuda else torch.device("cpu")
    torch.manual_seed(1)

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = TensorDataset(x[:1440], y[:1440])
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, args.batch_size // dist.get_world_size(), sampler=sampler, num_workers=1, pin_memory=cuda)

    net = Finetuner().to(device)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=args.lr)
    for epoch in range(args.epochs):
        if epoch == args.unfreeze_at:
            net.freeze_backbone(False)
            optimizer.add_param_group({"params": net.backbone.parameters(), "lr": args.lr / 2})
        sampler.set_epoch(epoch)
        run_epoch(model, loader, optimizer, device)
        acc = accuracy(net, x[1440:], y[1440:], device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} acc {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--unfreeze-at", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=72)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    main(parser.parse_args())
